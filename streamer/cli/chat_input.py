"""Where a conversation's messages come from: prompt_toolkit, plain input(), or a pipe.

The same rules everywhere: a line is a message; a trailing backslash goes on in the next line; a line that begins with
three quotes begins a text of several lines, which ends with three quotes at the end of a line.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from streamer.config.errors import ConfigError, UsageError
from streamer.config.load import cache_directory, no_color

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

PROMPT, MORE = "> ", ". "
QUOTES = '"""'
HISTORY_FILE = "chat_history"


class LineReader(Protocol):
    """Reads one line, or one pasted text of several lines."""

    interactive: bool

    def read(self, prompt: str) -> str:
        """Return the next line without its newline. Raises EOFError, KeyboardInterrupt, UsageError for bad bytes."""
        ...

    def had_text(self) -> bool:
        """Whether something was typed when KeyboardInterrupt came."""
        ...


def read_message(reader: LineReader) -> str:
    """Return the next message. Raises EOFError at the end; a text that the end cuts short is still returned."""
    text = reader.read(PROMPT)
    quoted = text.startswith(QUOTES)
    if quoted:
        text = text.removeprefix(QUOTES)
    with contextlib.suppress(EOFError):
        while (quoted and not text.endswith(QUOTES)) or (not quoted and text.endswith("\\")):
            if not quoted:
                text = text[:-1]
            text += "\n" + reader.read(MORE)
    return text.removesuffix(QUOTES).strip("\n") if quoted else text


class PipeReader:
    """Lines of a pipe or file."""

    interactive = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._number = 0

    def read(self, prompt: str) -> str:
        """Return the next line; nothing is printed for `prompt`."""
        from streamer.apps.prompt import decode

        line = self._stream.readline()
        self._number += 1
        if not line:
            raise EOFError
        return decode(line, f"standard input, line {self._number}").rstrip("\r\n")

    def had_text(self) -> bool:
        """A pipe has no line that is being typed."""
        return False


class PlainReader:
    """input() on a terminal, with the line editing that Python has."""

    interactive = True

    def __init__(self) -> None:
        self._stdout = sys.stdout.isatty()
        if self._stdout and not no_color():  # line editing writes control codes
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - input() uses it once it is imported

    def read(self, prompt: str) -> str:
        """Return the next line; the prompt goes to standard error where standard output is not the terminal."""
        try:
            if self._stdout:
                return input(prompt)
            sys.stderr.write(prompt)
            sys.stderr.flush()
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise UsageError(f"expected UTF-8 text, found byte 0x{error.object[error.start]:02x}.") from error
        except (EOFError, KeyboardInterrupt):
            sys.stderr.write("\n")  # the cursor stands behind the prompt
            raise
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def had_text(self) -> bool:
        """Not known: input() keeps it to itself."""
        return False


class ToolkitReader:
    """prompt_toolkit: history, editing, several lines with Esc Enter, a status bar."""

    interactive = True

    def __init__(self, toolbar: Callable[[int], str]) -> None:
        """`toolbar(columns)` is what the status bar says. Raises ImportError without prompt_toolkit."""
        from prompt_toolkit import PromptSession

        self._session: Any = PromptSession(
            history=_history(),
            key_bindings=_keys(),
            multiline=True,  # so that a paste keeps its lines; Enter still sends
            prompt_continuation=lambda *_: MORE,
            bottom_toolbar=lambda: toolbar(self._session.output.get_size().columns),
            enable_suspend=True,
        )

    def read(self, prompt: str) -> str:
        """Return what was entered."""
        text: str = self._session.prompt(prompt)
        return text

    def had_text(self) -> bool:
        """Whether the line was not empty."""
        return bool(self._session.default_buffer.text)


def piped_input() -> BinaryIO | None:
    """Return standard input where it is not a terminal and not closed."""
    return None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer


def open_reader(toolbar: Callable[[int], str]) -> LineReader:
    """Return the best reader for where standard input comes from."""
    if sys.stdin is None or not sys.stdin.isatty():
        return PipeReader(piped_input() or io.BytesIO())
    if sys.stdout.isatty() and not no_color():
        with contextlib.suppress(ImportError):
            return ToolkitReader(toolbar)
    return PlainReader()


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> Any:
    """A file only its owner can read; memory where the cache directory cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path = cache_directory() / HISTORY_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600))
    except (OSError, ConfigError):
        return InMemoryHistory()
    return FileHistory(str(path))
