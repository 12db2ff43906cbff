"""The two streams: generated text on standard output, everything else on standard error.

Control codes go to a terminal only, never to a pipe, under NO_COLOR or to a dumb terminal. A status is one line that
is redrawn on a terminal, and a plain line now and then elsewhere.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from types import TracebackType

from streamer.config.load import no_color

REDRAW_S = 0.1
PLAIN_STATUS_S = 10.0  # between status lines in a log
DIM, PLAIN, CLEAR_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"

# A model can write anything; on a terminal an escape sequence would be obeyed. Newline and tab are harmless.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd")


class Screen:
    """What one command writes. `level` is -1 (only errors on standard error), 0 or 1 (more)."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.text_on_terminal = sys.stdout.isatty()
        self.notes_on_terminal = sys.stderr.isatty()
        self._ansi = self.notes_on_terminal and not no_color()
        self._status = ""  # on the terminal now
        self._status_at = 0.0  # when a status was last written
        self._at_line_start = True

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.clear_status()
        if self.text_on_terminal:
            self.end_line()

    @property
    def columns(self) -> int:
        """Width of the terminal."""
        return shutil.get_terminal_size().columns

    def text(self, text: str) -> None:
        """Write generated text to standard output, at once. Raises OutputError when it cannot be written."""
        if not text:
            return
        self.clear_status()
        self._at_line_start = text.endswith("\n")
        sys.stdout.write(text.translate(_CONTROLS) if self.text_on_terminal else text)
        sys.stdout.flush()

    def end_line(self) -> None:
        """Let standard output end with a newline."""
        if not self._at_line_start:
            self.text("\n")

    def dim(self, text: str) -> None:
        """Write thinking to standard error: dim on a terminal."""
        self.clear_status()
        text = text.translate(_CONTROLS) if self.notes_on_terminal else text
        self._error(f"{DIM}{text}{PLAIN}" if self._ansi and text.strip() else text)

    def note(self, text: str, level: int = 0) -> None:
        """Write a line about what is going on, wrapped at words on a terminal."""
        if self.level < level:
            return
        self.clear_status()
        if self.text_on_terminal and self.notes_on_terminal:
            self.end_line()
        if self.notes_on_terminal:
            text = "\n".join(textwrap.fill(line, self.columns) for line in text.split("\n"))
            text = text.translate(_CONTROLS)
        self._error(f"{DIM}{text}{PLAIN}\n" if self._ansi else f"{text}\n")

    def error(self, error: Exception) -> None:
        """Write an error that the command survives."""
        self.clear_status()
        if self.text_on_terminal:
            self.end_line()
        self._error(f"error: {error}\n")

    def status(self, text: str, at_once: bool = False) -> None:
        """Show what is going on: redrawn in place on a terminal, else a plain line now and then.

        `at_once` is for what would otherwise wait: the first word about something that takes minutes.
        """
        if self.level < 0:
            return
        now = time.monotonic()
        if not self._ansi:
            if at_once or self._status_at == 0.0 or now - self._status_at >= PLAIN_STATUS_S:
                self._status_at = now
                self._error(f"{text}\n")
            return
        if self._status and not at_once and now - self._status_at < REDRAW_S:
            return
        self._status_at = now
        self._status = text[: max(1, self.columns - 1)]  # a line that wraps could not be redrawn
        self._error(f"{CLEAR_LINE}{DIM}{self._status}{PLAIN}")

    def clear_status(self) -> None:
        """Take the status off the terminal."""
        if self._status:
            self._status = ""
            self._error(CLEAR_LINE)

    @staticmethod
    def _error(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
