"""Where the seconds of a step go. Waiting for experts is inside `experts`; their source counts it."""

import time
from dataclasses import dataclass, field
from types import TracebackType


@dataclass(slots=True)
class Stopwatch:
    """Seconds spent inside `with` blocks. Not reentrant."""

    seconds: float = 0.0
    _started: float = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._started


@dataclass(frozen=True, slots=True)
class PartTimes:
    """One stopwatch a part of the forward."""

    attention: Stopwatch = field(default_factory=Stopwatch)  # mix, norm, KDA or MLA
    router: Stopwatch = field(default_factory=Stopwatch)  # of this layer, and of later ones for speculation
    shared: Stopwatch = field(default_factory=Stopwatch)  # shared experts, latent projections, the dense layer
    experts: Stopwatch = field(default_factory=Stopwatch)  # routed experts, waiting for their reads included
    head: Stopwatch = field(default_factory=Stopwatch)  # embedding rows, final mix, vocabulary projection

    def seconds(self) -> dict[str, float]:
        """Seconds by part."""
        return {name: getattr(self, name).seconds for name in self.__slots__}
