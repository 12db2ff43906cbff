"""Ctrl-C and SIGTERM: the first stops what is generated and keeps it, a later one ends the process.

While a model is loaded nothing is worth keeping, and an exception could be lost in a callback of the compiler: a signal
ends the process at once. At any other time (waiting for input) it is a KeyboardInterrupt.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn

from streamer.cli.streams import write_error

EXIT_INTERRUPTED = 130
SAME_PRESS_S = 0.5  # a nervous second press belongs to the first


class Interrupts:
    """Handlers for the life of one command."""

    def __init__(self) -> None:
        self.stopped = False
        """Whether the answer in progress, or the last one, was asked to stop."""
        self.terminated = False
        """Whether SIGTERM came: nothing more is to be started."""
        self._loading = False
        self._cancel: Callable[[], None] | None = None
        self._clean_up: Callable[[], None] | None = None
        self._first_at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned

    @contextmanager
    def loading(self, clean_up: Callable[[], None] | None = None) -> Iterator[None]:
        """While inside, a signal runs `clean_up` and ends the process."""
        self._loading, self._clean_up = True, clean_up
        try:
            yield
        finally:
            self._loading, self._clean_up = False, None

    @contextmanager
    def during(self, cancel: Callable[[], None], clean_up: Callable[[], None] | None = None) -> Iterator[None]:
        """While inside, a signal calls `cancel`; another one runs `clean_up` and ends the process."""
        self.stopped = False
        self._cancel, self._clean_up = cancel, clean_up
        try:
            yield
        finally:
            self._cancel = self._clean_up = None

    def repeat(self) -> None:
        """Cancel again: a signal that came before the engine began was forgotten by it."""
        if self.stopped and self._cancel is not None:
            self._cancel()

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.terminated |= number == signal.SIGTERM
        now = time.monotonic()
        if self._loading or (self.stopped and self._cancel is not None and now - self._first_at >= SAME_PRESS_S):
            self._quit()
        if self._cancel is None:
            raise KeyboardInterrupt
        if not self.stopped:
            self.stopped, self._first_at = True, now
            self._cancel()

    def _quit(self) -> NoReturn:
        if self._clean_up is not None:
            self._clean_up()
        write_error("\n")
        os._exit(EXIT_INTERRUPTED)
