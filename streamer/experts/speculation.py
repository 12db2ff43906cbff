"""Reads of what later layers are predicted to want: into staging, on the drive's leftover time, cancellable."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cache_policy.access import AccessPlan
from cache_policy.prefetch import PrefetchGate
from storage.read_queue import Priority, Ticket

if TYPE_CHECKING:
    from streamer.experts.streamed import Pool


class Speculation:
    """Predictions not yet settled by the real routing, and the reads they caused.

    Args:
        pool: shared with the requests.
        gate: which ranks of which layer are worth reading.
        layers: MoE layers, ascending.
        lookahead: how many of them ahead; 0 never predicts.
    """

    def __init__(self, pool: "Pool", gate: PrefetchGate, layers: tuple[int, ...], lookahead: int) -> None:
        self._pool = pool
        self._gate = gate
        self._layers = layers
        self._lookahead = lookahead
        self._ranked: dict[int, list[int]] = {}  # layer → the prediction that its next request will judge
        self._tickets: dict[int, dict[int, Ticket]] = {}  # layer → key → read, over or not
        self._unwanted: list[tuple[int, Ticket]] = []  # (layer, read) that could not be taken back

    def ahead(self, layer: int) -> tuple[int, ...]:
        """The next `lookahead` MoE layers behind `layer`."""
        return tuple(later for later in self._layers if later > layer)[: self._lookahead]

    def predict(self, layer: int, routing: np.ndarray) -> None:
        """Judge later, read now: see `ExpertSource.predict`. Best ranks of all rows first."""
        first = layer * self._pool.n_experts
        ranked = list(dict.fromkeys((routing.T.ravel() + np.int64(first)).tolist()))
        self._ranked[layer] = ranked
        self._reap()
        tickets = self._tickets.setdefault(layer, {})
        for key in [key for key in tickets if key not in ranked]:
            if self._pool.reader.cancel(tickets[key]):  # an earlier, longer-sighted prediction of the same layer
                del tickets[key]
                self._pool.cache.discard(layer, key)
        for key in self._gate.admitted(layer, ranked):
            slot = self._pool.cache.speculate(layer, key)
            if slot is not None:
                self._pool.arena.poison(slot)
                tickets[key] = self._pool.reader.submit(
                    key,
                    self._pool.span(layer, key),
                    self._pool.arena.slot(slot),
                    self._pool.arrivals_of(layer),
                    Priority.SPECULATION,
                )

    def settle(self, layer: int, rows: Sequence[Sequence[int]]) -> tuple[AccessPlan, dict[int, Ticket]]:
        """The real routing of `layer` is here: plan its request, take over what was predicted right, drop the rest.

        Returns the plan and the reads of its `arriving` keys, now as urgent as any.
        """
        pool, cache = self._pool, self._pool.cache
        self._reap()
        tickets = self._tickets.pop(layer, {})
        tickets |= {ticket.key: ticket for late, ticket in self._unwanted if late == layer}  # perhaps wanted now
        self._unwanted = [(late, ticket) for late, ticket in self._unwanted if late != layer]
        for key, ticket in list(tickets.items()):
            if ticket.landed:
                pool.skips[cache.predicted(layer)[key]] = ticket.skip
                cache.land(layer, key)
            elif ticket.over:  # a failed guess hurts nobody; if the expert is wanted, its own read will say so
                cache.discard(layer, key)
                del tickets[key]
        plan = cache.plan(layer, rows)
        if layer in self._ranked:
            self._gate.judge(layer, self._ranked.pop(layer), {key for row in rows for key in row})
        arriving = {}
        for key, ticket in tickets.items():
            if key in plan.arriving:
                pool.reader.promote(ticket)
                arriving[key] = ticket
            elif key in plan.predicted:
                pool.counters.useful_bytes += ticket.span.nbytes
            elif ticket.landed and key not in cache.predicted(layer):
                pool.counters.wasted_bytes += ticket.span.nbytes
            elif pool.reader.cancel(ticket):
                cache.discard(layer, key)
            else:
                self._unwanted.append((layer, ticket))
        return plan, arriving

    def close(self) -> None:
        """Take back what has not started and wait for what has: nobody writes to the arena after this."""
        for layer, tickets in self._tickets.items():
            self._unwanted.extend((layer, ticket) for ticket in tickets.values())
        self._tickets.clear()
        for layer, ticket in self._unwanted:
            if not self._pool.reader.cancel(ticket):
                ticket.wait()
            self._pool.cache.discard(layer, ticket.key)
        self._unwanted.clear()

    def _reap(self) -> None:
        """Free the slots of unwanted reads that are over by now."""
        for layer, ticket in self._unwanted[:]:
            if ticket.over:
                self._unwanted.remove((layer, ticket))
                self._pool.cache.discard(layer, ticket.key)
                self._pool.counters.wasted_bytes += ticket.span.nbytes if ticket.landed else 0
