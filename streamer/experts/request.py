"""One layer's experts for one step, from plan to last release."""

import time
from collections.abc import Iterator
from queue import Empty
from typing import TYPE_CHECKING

import numpy as np

from cache_policy.access import Load
from storage.read_queue import Ticket
from streamer.experts.source import ReadyExpert
from streamer.experts.speculation import Speculation

if TYPE_CHECKING:
    from streamer.experts.streamed import Pool

_GROUP = 16  # experts handed out together at most: enough for every thread, few enough to free their slots soon


class Request:
    """Owns the reads of the layer's open plan: submits them, hands out what landed, gives slots away."""

    def __init__(self, pool: "Pool", speculation: Speculation, layer: int, routing: np.ndarray, prefill: bool) -> None:
        self._pool = pool
        self._cache = pool.cache
        self._layer = layer
        self._first_key = layer * pool.n_experts
        self._done = pool.arrivals_of(layer)
        rows = (routing + np.int64(self._first_key)).tolist()
        self._tickets: dict[int, Ticket] = {}  # submitted, not committed
        self._plan, self._tickets = speculation.settle(layer, rows)
        asked = {key for wave in self._plan.waves for key in wave.serve}
        self._ready = [load for load in self._plan.loads if load.evicts not in asked]
        self._after = {load.evicts: load for load in self._plan.loads if load.evicts in asked}
        # Those here that lend their slot to a load go first: the earlier they are served, the earlier it starts.
        here = [*self._plan.hits, *(key for key in self._plan.predicted if key not in self._plan.arriving)]
        self._here = sorted(here, key=lambda key: key not in self._after)
        self._closed = False
        self._count(prefill)

    def submit_first(self) -> None:
        """Submit every load that has a slot now, in file-offset order."""
        spans = {load.key: self._pool.span(self._layer, load.key) for load in self._ready}
        for load in sorted(self._ready, key=lambda load: (spans[load.key].path, spans[load.key].offset)):
            self._submit(load)

    def experts(self) -> Iterator[list[ReadyExpert]]:
        """Yield each expert once, in groups. Asking for the next group gives the last one's slots away."""
        for first in range(0, len(self._here), _GROUP):
            yield from self._serve(self._here[first : first + _GROUP])
        outstanding = len(self._plan.loads) + len(self._plan.arriving)
        while outstanding:
            keys = self._land()
            outstanding -= len(keys)
            yield from self._serve(keys)

    def close(self) -> None:
        """End the request however far it got: cancel what has not started, wait for what has, keep what landed."""
        self._closed = True
        for ticket in list(self._tickets.values()):
            if not self._pool.reader.cancel(ticket):
                ticket.wait()  # a reader may still write to the slot
                if ticket.landed:
                    self._commit(ticket)
        self._tickets.clear()
        self._cache.abort(self._layer)

    def _count(self, prefill: bool) -> None:
        counters, plan = self._pool.counters, self._plan
        if prefill:
            counters.prefill_hits += len(plan.hits) + len(plan.predicted)
            counters.prefill_misses += len(plan.loads)
        else:
            counters.decode_hits += len(plan.hits)
            counters.decode_predicted += len(plan.predicted)
            counters.decode_misses += len(plan.loads)

    def _land(self) -> list[int]:
        """Wait for one read of this request, take those that are over as well; return what can be served."""
        assert self._tickets, "waiting for nothing"
        keys: list[int] = []
        started = time.perf_counter()
        ticket: Ticket | None = self._done.get()
        self._pool.counters.wait_s += time.perf_counter() - started
        while ticket is not None:
            if self._tickets.get(ticket.key) is ticket:  # else it is speculation that somebody has settled already
                if ticket.error is not None:
                    raise ticket.error
                self._commit(ticket)
                keys.append(ticket.key)
            ticket = self._poll() if len(keys) < _GROUP else None
        return keys

    def _poll(self) -> Ticket | None:
        try:
            return self._done.get_nowait()
        except Empty:
            return None

    def _serve(self, keys: list[int]) -> Iterator[list[ReadyExpert]]:
        if not keys:
            return
        self._check_open()
        pool = self._pool
        yield [(key - self._first_key, pool.view(self._cache.slot_of(self._layer, key))) for key in keys]
        self._check_open()
        for key in keys:
            self._cache.release(self._layer, key)
            load = self._after.pop(key, None)
            if load is not None:
                self._submit(load)

    def _commit(self, ticket: Ticket) -> None:
        del self._tickets[ticket.key]
        self._pool.skips[self._cache.slot_of(self._layer, ticket.key)] = ticket.skip
        if ticket.key in self._plan.arriving:
            self._pool.counters.useful_bytes += ticket.span.nbytes
        else:
            self._pool.counters.demand_bytes += ticket.span.nbytes
        self._cache.commit(self._layer, ticket.key)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"experts of layer {self._layer} were asked for after their context was left")

    def _submit(self, load: Load) -> None:
        pool, slot = self._pool, self._cache.start(self._layer, load.key)
        pool.arena.poison(slot)
        self._tickets[load.key] = pool.reader.submit(
            load.key, pool.span(self._layer, load.key), pool.arena.slot(slot), self._done
        )
