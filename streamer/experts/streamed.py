"""Experts paged from a drive: the cache decides, the reader reads, the arena holds; this file runs the three.

A slot is handed to a reader only after everybody who looked at its bytes is done, and to the cache's next request
only after every read into it is over. A failed read fails its own request; the cache stays whole.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np

from cache_policy.access import Load
from cache_policy.eviction.policy import EvictionPolicy
from cache_policy.plan import PlannedCache
from storage.arena import Arena
from storage.reader import ExpertReader, Ticket
from storage.span import ExpertSpan
from streamer.experts.source import ExpertCounters, ReadyExpert

SpanOf = Callable[[int, int], ExpertSpan]  # (layer, expert) → where it lies


class StreamedExperts:
    """An `ExpertSource` with `slots_per_layer` experts of each layer in RAM.

    Args:
        spans: where an expert lies.
        moe_layers: layers that have experts.
        n_experts: experts per layer.
        expert_bytes: payload of one expert.
        slots_per_layer: quota of each layer, at least 1. Below top_k every token streams in waves.
        reader: owned from here on, closed by `close`.
        policy: what to keep; LRU when not given.
        poison: fill freed slots with NaN-scale bytes, for tests.
        progress: called with (bytes touched, bytes in all) while the arena is made.

    Raises:
        ValueError: no slots.
        StorageError: the arena cannot be mapped.
    """

    def __init__(
        self,
        spans: SpanOf,
        moe_layers: Sequence[int],
        n_experts: int,
        expert_bytes: int,
        slots_per_layer: int,
        reader: ExpertReader,
        policy: EvictionPolicy | None = None,
        poison: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.counters = ExpertCounters()
        self.cache = PlannedCache(dict.fromkeys(moe_layers, slots_per_layer), policy)
        self.arena = Arena(self.cache.n_slots, expert_bytes, poison, progress=progress)
        self.reader = reader
        self.spans = spans
        self.n_experts = n_experts
        self._skips = [0] * self.cache.n_slots  # where in its slot a payload starts
        self._requests: dict[int, _Request] = {}

    @contextmanager
    def open(self, layer: int, routing: np.ndarray, prefill: bool) -> Iterator[Iterator[ReadyExpert]]:
        """Serve the union of `routing`; see `ExpertSource.open`. Hits come first, then experts as they land.

        More than one wave does not drain between waves: a slot is read into again as soon as its expert was served.
        """
        stale = self._requests.pop(layer, None)
        if stale is not None:
            stale.close()  # its own close was interrupted
        request = _Request(self, layer, routing, prefill)
        self._requests[layer] = request
        try:
            request.submit_first()
            yield request.experts()
        finally:
            request.close()
            self._requests.pop(layer, None)

    def close(self) -> None:
        """Abandon what is open, end the reader, give the memory back. Idempotent."""
        self.reader.close()
        for request in self._requests.values():
            request.close()
        self._requests.clear()
        self.arena.close()

    def view(self, slot: int) -> np.ndarray:
        """Return uint8[expert_bytes] of a landed expert."""
        return self.arena.slot_view(slot, self._skips[slot], self.arena.payload_bytes)

    def landed(self, ticket: Ticket, slot: int) -> None:
        """Book a read that is complete in its slot."""
        self._skips[slot] = ticket.skip
        self.counters.bytes_read += ticket.span.nbytes


class _Request:
    """One layer's experts for one step, from plan to last release."""

    def __init__(self, source: StreamedExperts, layer: int, routing: np.ndarray, prefill: bool) -> None:
        self._source = source
        self._cache = source.cache
        self._layer = layer
        self._first_key = layer * source.n_experts
        self._tickets: dict[int, Ticket] = {}  # submitted, not committed
        self._done: SimpleQueue[Ticket] = SimpleQueue()
        self._plan = self._cache.plan(layer, (routing + np.int64(self._first_key)).tolist())
        asked = {key for wave in self._plan.waves for key in wave.serve}
        self._ready = [load for load in self._plan.loads if load.evicts not in asked]
        self._after = {load.evicts: load for load in self._plan.loads if load.evicts in asked}
        # Hits that lend their slot to a load go first: the earlier they are served, the earlier that read starts.
        self._hits = sorted(self._plan.hits, key=lambda key: key not in self._after)
        self._closed = False
        counters, hits, misses = source.counters, len(self._plan.hits), len(self._plan.loads)
        if prefill:
            counters.prefill_hits += hits
            counters.prefill_misses += misses
        else:
            counters.decode_hits += hits
            counters.decode_misses += misses

    def submit_first(self) -> None:
        """Submit every load that has a slot now, in file-offset order."""
        spans = {load.key: self._span(load.key) for load in self._ready}
        for load in sorted(self._ready, key=lambda load: (spans[load.key].path, spans[load.key].offset)):
            self._submit(load, spans[load.key])

    def experts(self) -> Iterator[ReadyExpert]:
        """Yield each expert once. Asking for the next one gives the last one's slot away."""
        source = self._source
        for key in self._hits:
            yield self._serve(key)
            self._release(key)
        for _ in self._plan.loads:
            assert self._tickets, "waiting for nothing"
            started = time.perf_counter()
            ticket = self._done.get()
            source.counters.wait_s += time.perf_counter() - started
            if ticket.error is not None:
                raise ticket.error
            self._commit(ticket)
            yield self._serve(ticket.key)
            self._release(ticket.key)

    def close(self) -> None:
        """End the request however far it got: cancel what has not started, wait for what has, keep what landed."""
        self._closed = True
        for ticket in list(self._tickets.values()):
            if not self._source.reader.cancel(ticket):
                ticket.wait()  # a reader may still write to the slot
                if ticket.landed:
                    self._commit(ticket)
        self._tickets.clear()
        self._cache.abort(self._layer)

    def _serve(self, key: int) -> ReadyExpert:
        self._check_open()
        return key - self._first_key, self._source.view(self._cache.slot_of(self._layer, key))

    def _commit(self, ticket: Ticket) -> None:
        del self._tickets[ticket.key]
        self._source.landed(ticket, self._cache.slot_of(self._layer, ticket.key))
        self._cache.commit(self._layer, ticket.key)

    def _release(self, key: int) -> None:
        self._check_open()
        self._cache.release(self._layer, key)
        load = self._after.pop(key, None)
        if load is not None:
            self._submit(load, self._span(load.key))

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"experts of layer {self._layer} were asked for after their context was left")

    def _submit(self, load: Load, span: ExpertSpan) -> None:
        slot = self._cache.start(self._layer, load.key)
        arena = self._source.arena
        arena.poison(slot)
        self._tickets[load.key] = self._source.reader.submit(load.key, span, arena.slot(slot), self._done)

    def _span(self, key: int) -> ExpertSpan:
        return self._source.spans(self._layer, key - self._first_key)
