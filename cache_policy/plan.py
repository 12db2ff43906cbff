"""Which experts of a request are here, which must be loaded, into which slot, and what makes room.

The engine and the simulator run this same object, so that a simulated hit rate is the engine's hit rate. It decides
and keeps the books; it never reads, waits or looks at a clock. Keys are plain ints, `layer * n_experts + expert`.

One request runs through five calls::

    plan(group, rows)      one decision for the whole set of experts
    start(group, key)      a load begins: its victim is gone, the returned slot will be written to
    commit(group, key)     the load has landed
    release(group, key)    the expert was served; when the last one is, the request is over
    abort(group)           or: what landed stays, what did not is absent

Invariant: a slot belongs to one key that is resident or in flight, or to nobody. A key that is in flight, or that the
open request still has to serve, is never a victim.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from cache_policy.eviction.lru import Lru
from cache_policy.eviction.policy import EvictionPolicy, Rows, retention_order


@dataclass(frozen=True, slots=True)
class Load:
    """One read: `key` goes to `slot`, which `evicts` held until then (None: the slot was free).

    It may start as soon as `evicts` is served, or at once if this request does not ask for `evicts`.
    """

    key: int
    slot: int
    evicts: int | None


@dataclass(frozen=True, slots=True)
class Wave:
    """What the slots can hold at one time: the keys to serve, and those of them that must be loaded first."""

    serve: tuple[int, ...]
    loads: tuple[Load, ...]

    @property
    def evictions(self) -> tuple[int, ...]:
        """Keys that give their slot to this wave."""
        return tuple(load.evicts for load in self.loads if load.evicts is not None)


@dataclass(frozen=True, slots=True)
class AccessPlan:
    """One atomic decision for the set of experts that a group needs now.

    `hits` are counted against the cache as it stood before the request, in retention order. The waves together serve
    every key of the request exactly once; all hits are in the first. More than one wave means that the request does
    not fit the slots: some keys then pass through, evicted within the request that loaded them.
    """

    group: int
    hits: tuple[int, ...]
    waves: tuple[Wave, ...]

    @property
    def loads(self) -> tuple[Load, ...]:
        """Every read of the request, in wave order."""
        return tuple(load for wave in self.waves for load in wave.loads)

    @property
    def evictions(self) -> tuple[int, ...]:
        """Every key that loses its slot, in wave order."""
        return tuple(key for wave in self.waves for key in wave.evictions)


@dataclass(slots=True)
class _Request:
    """The open request of a group."""

    loads: dict[int, Load]  # not started
    unserved: set[int]
    in_flight: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Group:
    """The slots of one group."""

    capacity: int
    free: list[int]
    slot_of: dict[int, int] = field(default_factory=dict)  # resident or in flight
    request: _Request | None = None


class PlannedCache:
    """Slots of one pool, handed to groups (layers) as quotas, and the decisions about them.

    Args:
        quotas: group → number of slots, at least 1. Slots are numbered through in the order of the mapping.
        policy: what is worth keeping; LRU when not given.

    Raises:
        ValueError: a quota below 1: such a group could serve nothing.
    """

    def __init__(self, quotas: Mapping[int, int], policy: EvictionPolicy | None = None) -> None:
        self._policy: EvictionPolicy = Lru() if policy is None else policy
        self._groups: dict[int, _Group] = {}
        first = 0
        for group, capacity in quotas.items():
            if capacity < 1:
                raise ValueError(f"group {group} has {capacity} slots; expected at least 1, give it a larger quota")
            self._groups[group] = _Group(capacity, list(range(first, first + capacity)))
            first += capacity
        self.n_slots = first

    def plan(self, group: int, rows: Rows) -> AccessPlan:
        """Decide for the union of `rows` (a row of keys per token in step order, each in router rank order).

        Nothing moves yet, only the policy is told; the request stays open until its last key is released, or `abort`.

        Raises:
            RuntimeError: the group's last request is still open.
        """
        state = self._groups[group]
        if state.request is not None:
            raise RuntimeError(f"group {group} has an open request; release its keys or abort it first")
        wanted = retention_order(rows)
        if not wanted:
            return AccessPlan(group, (), ())
        self._policy.record(group, rows)
        hits = tuple(key for key in wanted if key in state.slot_of)
        plan = AccessPlan(group, hits, self._waves(group, wanted, hits))
        state.request = _Request({load.key: load for load in plan.loads}, set(wanted))
        return plan

    def start(self, group: int, key: int) -> int:
        """Begin the load of `key`: its victim leaves, and the slot returned is in flight until `commit` or `abort`.

        Raises:
            RuntimeError: the victim is still to be served.
        """
        state, request = self._open_request(group)
        load = request.loads[key]
        if load.evicts is None:
            state.free.remove(load.slot)
        elif load.evicts in request.unserved:
            raise RuntimeError(f"expert {key} cannot take slot {load.slot}: expert {load.evicts} was not served yet")
        else:
            self._drop(group, load.evicts)
        del request.loads[key]
        request.in_flight.add(key)
        state.slot_of[key] = load.slot
        return load.slot

    def commit(self, group: int, key: int) -> None:
        """The load of `key` has landed: it is resident."""
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

    def abort(self, group: int) -> None:
        """Close the group's request early (without one, do nothing). What landed stays, what did not is absent.

        Nobody may be writing to a slot in flight any more: it is free from here on.
        """
        state = self._groups[group]
        if state.request is None:
            return
        for key in state.request.in_flight:
            state.free.append(state.slot_of[key])
            self._drop(group, key)
        for key in state.request.loads:
            self._policy.forget(group, key)
        state.request = None

    def run(self, plan: AccessPlan) -> None:
        """Carry out a whole plan as if every read landed at once: what a simulator does."""
        for wave in plan.waves:
            for load in wave.loads:
                self.start(plan.group, load.key)
                self.commit(plan.group, load.key)
            for key in wave.serve:
                self.release(plan.group, key)

    def slot_of(self, group: int, key: int) -> int:
        """Return the slot of a key that is resident or in flight. Raises KeyError when it is neither."""
        return self._groups[group].slot_of[key]

    def resident(self, group: int) -> frozenset[int]:
        """Return the keys of the group that have landed."""
        state = self._groups[group]
        in_flight = state.request.in_flight if state.request else set()
        return frozenset(state.slot_of.keys() - in_flight)

    def _waves(self, group: int, wanted: list[int], hits: tuple[int, ...]) -> tuple[Wave, ...]:
        """Order the loads into slots so that the request ends with the keys the policy ranks first."""
        state = self._groups[group]
        asked = set(wanted)
        missing = asked.difference(hits)
        order = list(self._policy.order(group, asked | state.slot_of.keys()))
        keep = order[: state.capacity]
        if missing and len(keep) == state.capacity and all(key in state.slot_of for key in keep):
            keep.pop()  # the misses need one slot to pass through; the least valuable resident gives way
        kept = set(keep)
        # Keys that only pass through go first, the least valuable first, so that the waves end with what stays.
        loads = deque(key for key in reversed(order) if key in missing and key not in kept)
        loads.extend(key for key in reversed(keep) if key in missing)
        lanes: deque[tuple[int, int | None]] = deque((slot, None) for slot in state.free)
        leaving = [key for key in reversed(order) if key in state.slot_of and key not in kept]
        lanes.extend((state.slot_of[key], key) for key in leaving if key not in asked)
        served_first = deque((state.slot_of[key], key) for key in leaving if key in asked)

        waves: list[Wave] = []
        serve = hits
        while serve or loads:
            assert serve or lanes, "a load without a slot"
            wave = []
            for _ in range(min(len(lanes), len(loads))):
                slot, evicts = lanes.popleft()
                wave.append(Load(loads.popleft(), slot, evicts))
            waves.append(Wave((*serve, *(load.key for load in wave)), tuple(wave)))
            serve = ()
            lanes.extend(served_first)  # hits that do not stay lend their slot once they are served
            served_first.clear()
            lanes.extend((load.slot, load.key) for load in wave if load.key not in kept)
        return tuple(waves)

    def _open_request(self, group: int) -> tuple[_Group, _Request]:
        state = self._groups[group]
        if state.request is None:
            raise RuntimeError(f"group {group} has no open request; plan() comes first")
        return state, state.request

    def _drop(self, group: int, key: int) -> None:
        del self._groups[group].slot_of[key]
        self._policy.forget(group, key)
