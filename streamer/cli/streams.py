"""Standard output and standard error of a command that may lose them: a full disk, a reader that has gone away.

What standard error cannot take is dropped, for notes are not worth an answer. What standard output cannot take ends the
command, once: later writes are ignored, so that cleaning up does not fail over it again.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from pathlib import Path

EXIT_READER_GONE = 128 + signal.SIGPIPE  # 141, as the shell reports it of any filter before `| head`


class OutputError(Exception):
    """Standard output cannot be written. `reader_gone`: whoever read it has enough, which needs no message."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written: {error.strerror}.")
        self.reader_gone = error.errno == errno.EPIPE


class Notes(io.TextIOWrapper):
    """A standard error that may fail."""

    _lost = False

    def write(self, text: str) -> int:
        """Write, or drop what cannot be written and everything after it."""
        if not self._lost:
            try:
                return super().write(text)
            except OSError:
                self._lost = True
        return len(text)

    def flush(self) -> None:
        """Flush what was not dropped."""
        if not self._lost:
            try:
                super().flush()
            except OSError:
                self._lost = True


class Output(io.TextIOWrapper):
    """A standard output whose first failure is an OutputError and whose later ones are silent."""

    _lost = False

    def write(self, text: str) -> int:
        """Write. Raises OutputError."""
        if not self._lost:
            try:
                return super().write(text)
            except OSError as error:
                self._lost = True
                raise OutputError(error) from error
        return len(text)

    def flush(self) -> None:
        """Flush. Raises OutputError."""
        if not self._lost:
            try:
                super().flush()
            except OSError as error:
                self._lost = True
                raise OutputError(error) from error


def open_streams() -> None:
    """Replace sys.stdout and sys.stderr by streams that fail as described above; a closed one goes nowhere."""
    # No file that is opened later may get the number of a closed standard stream: notes would be written into it.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = _wrapped(sys.stdout, Output)
    sys.stderr = _wrapped(sys.stderr, Notes)


def write_error(text: str) -> None:
    """Write to standard error past sys.stderr: for a signal handler, which may have come while it was being written."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def _wrapped(stream: object, kind: type[Notes] | type[Output]) -> io.TextIOWrapper:
    """A file name that is not UTF-8 must not end the program either: it is shown with escapes."""
    if not isinstance(stream, io.TextIOWrapper):  # started with the stream closed
        return Path(os.devnull).open("w", encoding="utf-8")  # for good
    buffered = kind is Output and not stream.isatty()
    return kind(stream.buffer, encoding=stream.encoding, errors="backslashreplace", line_buffering=not buffered)
