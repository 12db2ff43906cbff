"""Every expert in RAM: read once at start through the same reader, a hit for ever after."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np

from storage.arena import Arena
from storage.read_queue import Ticket
from storage.reader import ExpertReader
from storage.span import ExpertSpan
from streamer.experts.source import ExpertCounters, ReadyExpert

_QUEUED_PER_THREAD = 4  # enough to keep every thread busy, few enough to stop soon


class ResidentExperts:
    """An `ExpertSource` that holds the whole pool.

    Args:
        spans: (layer, expert) → where it lies.
        moe_layers: layers that have experts.
        n_experts: experts per layer.
        expert_bytes: payload of one expert.
        reader: shared; used only here.
        progress: called with (bytes read, bytes in all) after each expert.

    Raises:
        StorageError: the pool cannot be mapped, or an expert cannot be read.
    """

    def __init__(
        self,
        spans: Callable[[int, int], ExpertSpan],
        moe_layers: Sequence[int],
        n_experts: int,
        expert_bytes: int,
        reader: ExpertReader,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.counters = ExpertCounters()
        self._n_experts = n_experts
        self._first = {layer: index * n_experts for index, layer in enumerate(moe_layers)}
        n_slots = len(moe_layers) * n_experts
        self._skips = [0] * n_slots
        # Not touched first: every slot is about to be written once, by several threads.
        self._arena = Arena(n_slots, expert_bytes, touch=False)
        tickets: list[Ticket] = []
        try:
            self._load(spans, reader, progress, tickets)
        except BaseException:
            for ticket in tickets:  # no thread may write to the arena any more
                if not reader.cancel(ticket):
                    ticket.wait()
            self._arena.close()
            raise

    @contextmanager
    def open(self, layer: int, routing: np.ndarray, prefill: bool) -> Iterator[Iterator[list[ReadyExpert]]]:
        """Serve the union of `routing`, ascending, as one group; see `ExpertSource.open`. Everything is a hit."""
        union = np.unique(routing).tolist()
        if prefill:
            self.counters.prefill_hits += len(union)
        else:
            self.counters.decode_hits += len(union)
        yield iter([[(expert, self._view(self._first[layer] + expert)) for expert in union]] if union else [])

    def ahead(self, layer: int) -> tuple[int, ...]:
        """No layer: there is nothing to read."""
        return ()

    def predict(self, layer: int, routing: np.ndarray) -> None:
        """Nothing: every expert is here."""

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._arena.close()

    def _view(self, slot: int) -> np.ndarray:
        return self._arena.slot_view(slot, self._skips[slot], self._arena.payload_bytes)

    def _load(
        self,
        spans: Callable[[int, int], ExpertSpan],
        reader: ExpertReader,
        progress: Callable[[int, int], None] | None,
        tickets: list[Ticket],
    ) -> None:
        """Read every expert; `tickets` takes the reads that are on their way."""
        jobs = [
            (spans(layer, expert), first + expert)
            for layer, first in self._first.items()
            for expert in range(self._n_experts)
        ]
        jobs.sort(key=lambda job: (job[0].path, job[0].offset))
        total_bytes = sum(span.nbytes for span, _ in jobs)
        done: SimpleQueue[Ticket] = SimpleQueue()
        window = reader.n_threads * _QUEUED_PER_THREAD
        for index in range(len(jobs) + window):
            if index < len(jobs):
                span, slot = jobs[index]
                tickets.append(reader.submit(slot, span, self._arena.slot(slot), done))
            if window <= index:
                ticket = done.get()
                tickets.remove(ticket)
                if ticket.error is not None:
                    raise ticket.error
                self._skips[ticket.key] = ticket.skip
                self.counters.demand_bytes += ticket.span.nbytes
                if progress is not None:
                    progress(self.counters.demand_bytes, total_bytes)
