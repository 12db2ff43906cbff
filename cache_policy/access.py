"""What a cache decides about one request: hits, loads, what makes room, in which order."""

from dataclasses import dataclass


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

    `hits` are counted against the cache as it stood before the request, in retention order. `predicted` are keys that
    speculation brought or is bringing; those in `arriving` are still in flight and need a `commit` like a load. The
    waves together serve every key of the request exactly once; hits and predicted keys are in the first. More than one
    wave means that the request does not fit the slots: some keys then pass through.
    """

    group: int
    hits: tuple[int, ...]
    predicted: tuple[int, ...]
    arriving: frozenset[int]
    waves: tuple[Wave, ...]

    @property
    def loads(self) -> tuple[Load, ...]:
        """Every read of the request, in wave order."""
        return tuple(load for wave in self.waves for load in wave.loads)

    @property
    def evictions(self) -> tuple[int, ...]:
        """Every key that loses its slot to a load, in wave order."""
        return tuple(key for wave in self.waves for key in wave.evictions)
