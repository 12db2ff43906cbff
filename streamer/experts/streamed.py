"""Experts paged from a drive: the cache decides, the reader reads, the arena holds; this file runs the three.

A slot is handed to a reader only after everybody who looked at its bytes is done, and to the cache's next request
only after every read into it is over. A failed read fails its own request; the cache stays whole.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np

from cache_policy.eviction.policy import EvictionPolicy
from cache_policy.plan import PlannedCache
from cache_policy.prefetch import PrefetchGate
from storage.arena import Arena
from storage.read_queue import Ticket
from storage.reader import ExpertReader
from storage.span import ExpertSpan
from streamer.experts.request import Request
from streamer.experts.source import ExpertCounters, ReadyExpert
from streamer.experts.speculation import Speculation

SpanOf = Callable[[int, int], ExpertSpan]  # (layer, expert) → where it lies


@dataclass(frozen=True, slots=True)
class Slots:
    """How an arena is shared out.

    `quotas`: MoE layer → experts of it that stay in memory. `staging`: slots of no layer, for what a step asks for
    beyond a quota; of these, speculation may hold `speculation`.
    """

    quotas: Mapping[int, int]
    staging: int = 0
    speculation: int = 0

    @property
    def total(self) -> int:
        """All slots."""
        return sum(self.quotas.values()) + self.staging


@dataclass(slots=True)
class Pool:
    """Slots, their bytes, and the reads into them: what requests and speculation share."""

    spans: SpanOf
    n_experts: int
    cache: PlannedCache
    arena: Arena
    reader: ExpertReader
    counters: ExpertCounters = field(default_factory=ExpertCounters)
    skips: dict[int, int] = field(default_factory=dict)  # slot → where in it the payload starts
    arrivals: dict[int, SimpleQueue[Ticket]] = field(default_factory=dict)  # layer → reads that are over

    def span(self, layer: int, key: int) -> ExpertSpan:
        """Where an expert lies."""
        return self.spans(layer, key - layer * self.n_experts)

    def arrivals_of(self, layer: int) -> SimpleQueue[Ticket]:
        """The queue in which the reads of a layer come out."""
        return self.arrivals.setdefault(layer, SimpleQueue())

    def view(self, slot: int) -> np.ndarray:
        """Return uint8[expert_bytes] of a landed expert."""
        return self.arena.slot_view(slot, self.skips[slot], self.arena.payload_bytes)


class StreamedExperts:
    """An `ExpertSource` with some experts of each layer in RAM.

    Args:
        spans: where an expert lies.
        n_experts: experts per layer.
        expert_bytes: payload of one expert.
        slots: how many, for which layers.
        reader: shared; closed by its owner, after this source.
        policy: what to keep; LRU when not given.
        lookahead: how many layers ahead to predict; 0 turns speculation off.
        poison: fill freed slots with NaN-scale bytes, for tests.
        progress: called with (bytes touched, bytes in all) while the arena is made.

    Raises:
        ValueError: no slots.
        StorageError: the arena cannot be mapped.
    """

    def __init__(
        self,
        spans: SpanOf,
        n_experts: int,
        expert_bytes: int,
        slots: Slots,
        reader: ExpertReader,
        policy: EvictionPolicy | None = None,
        lookahead: int = 0,
        poison: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.gate = PrefetchGate()
        cache = PlannedCache(slots.quotas, policy, slots.staging, slots.speculation)
        self.pool = Pool(spans, n_experts, cache, Arena(cache.n_slots, expert_bytes, poison, progress=progress), reader)
        self._speculation = Speculation(self.pool, self.gate, tuple(sorted(slots.quotas)), lookahead)
        self._requests: dict[int, Request] = {}

    @property
    def counters(self) -> ExpertCounters:
        """See `ExpertSource`."""
        return self.pool.counters

    @contextmanager
    def open(self, layer: int, routing: np.ndarray, prefill: bool) -> Iterator[Iterator[list[ReadyExpert]]]:
        """Serve the union of `routing`; see `ExpertSource.open`. Hits come first, then experts as they land.

        More than one wave does not drain between waves: a slot is read into again as soon as its expert was served.
        """
        stale = self._requests.pop(layer, None)
        if stale is not None:
            stale.close()  # its own close was interrupted
        request = Request(self.pool, self._speculation, layer, routing, prefill)
        self._requests[layer] = request
        try:
            request.submit_first()
            yield request.experts()
        finally:
            request.close()
            self._requests.pop(layer, None)

    def ahead(self, layer: int) -> tuple[int, ...]:
        """See `ExpertSource.ahead`."""
        return self._speculation.ahead(layer)

    def predict(self, layer: int, routing: np.ndarray) -> None:
        """See `ExpertSource.predict`."""
        self._speculation.predict(layer, routing)

    def close(self) -> None:
        """Abandon what is open and give the memory back. Idempotent."""
        for request in self._requests.values():
            request.close()
        self._requests.clear()
        self._speculation.close()
        self.pool.arena.close()
