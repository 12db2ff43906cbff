"""Which experts of a request are here, which must be loaded, into which slot, and what makes room.

The engine and the simulator run this same object, so that a simulated hit rate is the engine's hit rate. It decides
and keeps the books; it never reads, waits or looks at a clock. Keys are plain ints, `layer * n_experts + expert`.

One request runs through five calls::

    plan(group, rows)      one decision for the whole set of experts
    start(group, key)      a load begins: its victim is gone, the returned slot will be written to
    commit(group, key)     the load has landed
    release(group, key)    the expert was served; when the last one is, the request is over
    abort(group)           or: what landed stays, what did not is absent

Between requests a group keeps at most its quota. A *staging* share belongs to no group: through it pass the keys of a
request that exceed the quota, and into it speculation reads what a later request is predicted to ask for::

    speculate(group, key)  a slot for a predicted key, or None
    land(group, key)       it has landed; the next request of the group takes it over where it is, without a copy
    discard(group, key)    it was wrong, or failed, or was cancelled

Invariant: a slot belongs to one key that is resident or in flight, or to nobody. A key that is in flight, or that the
open request still has to serve, is never a victim.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from cache_policy.access import AccessPlan, Load, Wave
from cache_policy.eviction.lru import Lru
from cache_policy.eviction.policy import EvictionPolicy, Rows, retention_order


@dataclass(slots=True)
class _Request:
    """The open request of a group."""

    loads: dict[int, Load]  # not started
    unserved: set[int]
    in_flight: set[int]
    kept: frozenset[int]  # what stays when it is over
    lent: frozenset[int]  # what gives its slot to a load


@dataclass(slots=True)
class _Group:
    """The slots of one group. Together they are its quota, or more while it borrows from staging."""

    quota: int
    free: list[int]
    slot_of: dict[int, int] = field(default_factory=dict)  # resident or in flight
    predicted: dict[int, int] = field(default_factory=dict)  # in staging slots, for the next request
    landed: set[int] = field(default_factory=set)  # of the predicted
    request: _Request | None = None

    @property
    def n_slots(self) -> int:
        """Slots that are the group's now: held, free, or free and promised to a load."""
        promised = 0
        if self.request is not None:
            promised = sum(load.evicts is None for load in self.request.loads.values())
        return len(self.slot_of) + len(self.free) + promised


class PlannedCache:
    """Slots of one pool, handed to groups (layers) as quotas, and the decisions about them.

    Args:
        quotas: group → number of slots it may keep. Slots are numbered through in the order of the mapping.
        policy: what is worth keeping; LRU when not given.
        staging: slots behind those, of no group.
        speculation: how many of the staging slots predicted keys may hold; the others are for what exceeds a quota.

    Raises:
        ValueError: a group that might have no slot at all to serve a request with.
    """

    def __init__(
        self, quotas: Mapping[int, int], policy: EvictionPolicy | None = None, staging: int = 0, speculation: int = 0
    ) -> None:
        self._policy: EvictionPolicy = Lru() if policy is None else policy
        self._groups: dict[int, _Group] = {}
        first = 0
        for group, quota in quotas.items():
            if quota < 0 or quota + staging - speculation < 1:
                raise ValueError(
                    f"group {group} has {quota} slots and {staging - speculation} staging slots beside speculation; "
                    "expected at least 1 in all, give it a larger quota"
                )
            self._groups[group] = _Group(quota, list(range(first, first + quota)))
            first += quota
        self.n_slots = first + staging
        self._staging = list(range(first, self.n_slots))
        self._may_speculate = speculation

    def plan(self, group: int, rows: Rows) -> AccessPlan:
        """Decide for the union of `rows` (a row of keys per token in step order, each in router rank order).

        Predicted keys that the request does not want are dropped if they have landed; those in flight stay until
        `discard`. Nothing else moves yet, only the policy is told; the request stays open until its last key is
        released, or `abort`.

        Raises:
            RuntimeError: the group's last request is still open.
        """
        state = self._groups[group]
        if state.request is not None:
            raise RuntimeError(f"group {group} has an open request; release its keys or abort it first")
        wanted = retention_order(rows)
        for key in state.landed.difference(wanted):
            self.discard(group, key)
        if not wanted:
            return AccessPlan(group, (), (), frozenset(), ())
        self._policy.record(group, rows)
        hits = tuple(key for key in wanted if key in state.slot_of)
        predicted = tuple(key for key in wanted if key in state.predicted)
        arriving = frozenset(predicted) - state.landed
        for key in predicted:
            state.slot_of[key] = state.predicted.pop(key)
        state.landed.difference_update(predicted)
        kept, waves = self._waves(group, wanted)
        plan = AccessPlan(group, hits, predicted, arriving, waves)
        loads = {load.key: load for load in plan.loads}
        state.request = _Request(loads, set(wanted), set(arriving), kept, frozenset(plan.evictions))
        promised = {load.slot for load in plan.loads if load.evicts is None}
        state.free = [slot for slot in state.free if slot not in promised]
        return plan

    def start(self, group: int, key: int) -> int:
        """Begin the load of `key`: its victim leaves, and the slot returned is in flight until `commit` or `abort`.

        Raises:
            RuntimeError: the victim is still to be served.
        """
        state, request = self._open_request(group)
        load = request.loads[key]
        if load.evicts is not None:
            if load.evicts in request.unserved:
                raise RuntimeError(
                    f"expert {key} cannot take slot {load.slot}: expert {load.evicts} was not served yet"
                )
            del state.slot_of[load.evicts]
            self._policy.forget(group, load.evicts)
        del request.loads[key]
        request.in_flight.add(key)
        state.slot_of[key] = load.slot
        return load.slot

    def commit(self, group: int, key: int) -> None:
        """The load of `key`, or its predicted read, has landed: it is resident."""
        _, request = self._open_request(group)
        request.in_flight.remove(key)

    def release(self, group: int, key: int) -> None:
        """`key` was served and nobody looks at its bytes any more. Releasing the last key closes the request.

        Raises:
            RuntimeError: the key has not landed, so it cannot have been served.
        """
        state, request = self._open_request(group)
        if key in request.in_flight or key in request.loads:
            raise RuntimeError(f"expert {key} was released before it landed")
        request.unserved.remove(key)
        if not request.unserved:
            state.request = None
            self._trim(group, request.kept)
        elif key not in request.kept and key not in request.lent:
            self._drop(group, key)  # it only passed through; speculation may want the slot

    def abort(self, group: int) -> None:
        """Close the group's request early (without one, do nothing). What landed stays, what did not is absent.

        Nobody may be writing to a slot in flight any more: it is free from here on.
        """
        state = self._groups[group]
        request, state.request = state.request, None
        if request is None:
            return
        for load in request.loads.values():
            self._policy.forget(group, load.key)
            if load.evicts is None:
                self._give(state, load.slot)
        for key in request.in_flight:
            self._drop(group, key)
        self._trim(group, list(self._policy.order(group, state.slot_of.keys()))[: state.quota])

    def run(self, plan: AccessPlan) -> None:
        """Carry out a whole plan as if every read landed at once: what a simulator does."""
        for key in plan.arriving:
            self.commit(plan.group, key)
        for wave in plan.waves:
            for load in wave.loads:
                self.start(plan.group, load.key)
                self.commit(plan.group, load.key)
            for key in wave.serve:
                self.release(plan.group, key)

    def speculate(self, group: int, key: int) -> int | None:
        """Take a staging slot for a key that the group's next request is predicted to want.

        Returns the slot, in flight until `land` or `discard`; None where the key is here or on its way already, where
        the group's request is open, or where speculation has all it may have.
        """
        state = self._groups[group]
        held = sum(len(other.predicted) for other in self._groups.values())
        if state.request is not None or key in state.slot_of or key in state.predicted:
            return None
        if held >= self._may_speculate or not self._staging:
            return None
        state.predicted[key] = self._staging.pop()
        return state.predicted[key]

    def land(self, group: int, key: int) -> None:
        """A predicted key has landed."""
        state = self._groups[group]
        assert key in state.predicted
        state.landed.add(key)

    def discard(self, group: int, key: int) -> None:
        """Give up a predicted key. Nobody may be writing to its slot any more."""
        state = self._groups[group]
        state.landed.discard(key)
        self._staging.append(state.predicted.pop(key))

    def slot_of(self, group: int, key: int) -> int:
        """Return the slot of a key that is resident or in flight. Raises KeyError when it is neither."""
        return self._groups[group].slot_of[key]

    def predicted(self, group: int) -> dict[int, int]:
        """Return the slots of the group's predicted keys, landed or in flight."""
        return dict(self._groups[group].predicted)

    def resident(self, group: int) -> frozenset[int]:
        """Return the keys of the group that have landed, predicted ones apart."""
        state = self._groups[group]
        in_flight = state.request.in_flight if state.request else set()
        return frozenset(state.slot_of.keys() - in_flight)

    def _waves(self, group: int, wanted: list[int]) -> tuple[frozenset[int], tuple[Wave, ...]]:
        """Order the loads into slots so that the request ends with the keys the policy ranks first: those, the waves.

        Borrows from staging what the group lacks.
        """
        state = self._groups[group]
        asked = set(wanted)
        here = tuple(key for key in wanted if key in state.slot_of)
        missing = asked.difference(here)
        order = list(self._policy.order(group, asked | state.slot_of.keys()))
        keep = order[: state.quota]
        if missing and not state.free and not self._staging and state.slot_of.keys() <= set(keep):
            # The misses need one slot to pass through: the least valuable resident gives way to the best of them.
            keep[-1] = next(key for key in order if key in missing)
        kept = frozenset(keep)
        leaving = [key for key in reversed(order) if key in state.slot_of and key not in kept]
        victims = [key for key in leaving if key not in asked]
        lacking = len(missing) - len(state.free) - len(victims)
        state.free.extend(self._staging.pop() for _ in range(min(max(lacking, 0), len(self._staging))))
        # Keys that only pass through go first, ascending (file order), so that the waves end with what stays.
        loads = deque(sorted(missing - kept))
        loads.extend(key for key in reversed(keep) if key in missing)
        lanes: deque[tuple[int, int | None]] = deque((slot, None) for slot in state.free)
        lanes.extend((state.slot_of[key], key) for key in victims)
        served_first = [(state.slot_of[key], key) for key in leaving if key in asked]

        waves: list[Wave] = []
        serve = here
        while serve or loads:
            assert serve or lanes, "a load without a slot"
            wave = []
            for _ in range(min(len(lanes), len(loads))):
                slot, evicts = lanes.popleft()
                wave.append(Load(loads.popleft(), slot, evicts))
            waves.append(Wave((*serve, *(load.key for load in wave)), tuple(wave)))
            serve = ()
            lanes.extend(served_first)  # hits that do not stay lend their slot once they are served
            served_first = []
            lanes.extend((load.slot, load.key) for load in wave if load.key not in kept)
        return kept, tuple(waves)

    def _open_request(self, group: int) -> tuple[_Group, _Request]:
        state = self._groups[group]
        if state.request is None:
            raise RuntimeError(f"group {group} has no open request; plan() comes first")
        return state, state.request

    def _trim(self, group: int, kept: Collection[int]) -> None:
        """Drop what does not stay, and give what was borrowed back."""
        state = self._groups[group]
        for key in [key for key in state.slot_of if key not in kept]:
            self._drop(group, key)
        while state.n_slots > state.quota:
            self._staging.append(state.free.pop())

    def _drop(self, group: int, key: int) -> None:
        state = self._groups[group]
        self._give(state, state.slot_of.pop(key))
        self._policy.forget(group, key)

    def _give(self, state: _Group, slot: int) -> None:
        """Free a slot: the group's own up to its quota, else back to staging."""
        (state.free if state.n_slots < state.quota else self._staging).append(slot)
