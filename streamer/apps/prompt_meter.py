"""How far the reading of a prompt is, and how long it will take: at seconds per token a prompt takes minutes."""

import time
from collections.abc import Callable


class PromptMeter:
    """Fed by chunks and by layers within a chunk; estimates from this prompt's own speed.

    `total` tokens go through `n_layers` layers in chunks of `chunk` tokens.
    """

    def __init__(self, total: int, chunk: int, n_layers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.total = total
        self.done = 0
        self.layer = 0
        self.n_layers = n_layers
        self._chunk = chunk
        self._clock = clock
        self._began = clock()

    def advance(self, done: int) -> None:
        """Note that `done` tokens are computed."""
        self.done, self.layer = done, 0

    @property
    def finished(self) -> bool:
        """Whether the whole prompt is computed."""
        return self.done >= self.total

    @property
    def elapsed_s(self) -> float:
        """Seconds since the reading began."""
        return self._clock() - self._began

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds to the end; None before the first layer is done."""
        in_flight = min(self._chunk, self.total - self.done) * self.layer / self.n_layers
        fraction = (self.done + in_flight) / max(self.total, 1)
        return self.elapsed_s * (1 - fraction) / fraction if fraction > 0 else None
