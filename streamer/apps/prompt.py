"""Where a prompt comes from: text, a file, standard input, or token ids. Exactly one source, read strictly."""

import codecs
from pathlib import Path
from typing import BinaryIO

from streamer.config.errors import UsageError

STANDARD_INPUT = Path("-")


def read_prompt(text: str | None, file: Path | None, ids: str | None, piped: BinaryIO | None) -> str | list[int]:
    """Return the prompt as text, or as ids where `ids` is given.

    `piped` is standard input where it is not a terminal; it is read only when nothing else is given, or for `-f -`.
    Raises UsageError for two sources or none, a file that cannot be read, bytes that are not UTF-8, malformed ids.
    """
    given = [flag for flag, value in (("-p", text), ("-f", file), ("--ids", ids)) if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: expected one prompt, found {len(given)}. Leave one of them out.")
    if ids is not None:
        return parse_ids(ids)
    if text is not None:
        return checked(text, "-p")
    if file is not None and file != STANDARD_INPUT:
        return _text(_read(file), str(file))
    if piped is None:
        raise UsageError("There is no prompt: give -p TEXT, -f FILE or --ids 1,2,3, or pipe a text in.")
    return _text(piped.read(), "standard input")


def parse_ids(text: str) -> list[int]:
    """Return the ids of '3,17,101' (commas, blanks or both). Raises UsageError naming what is not a number."""
    words = text.replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 10):
            raise UsageError(f"--ids: expected numbers such as 3,17,101, found {word!r}.")
    return [int(word) for word in words]


def checked(text: str, flag: str) -> str:
    """Return an argument of the command line; raise UsageError naming its flag where its bytes were not UTF-8.

    Python hands each such byte on as a lone surrogate.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        found = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"the lone surrogate U+{code:04X}"
        raise UsageError(f"{flag}: expected UTF-8 text, found {found} at character {error.start:,}.") from None
    return text


def decode(data: bytes, where: str) -> str:
    """Return UTF-8 bytes as text. Raises UsageError with the offset of the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where}: expected UTF-8 text, found byte 0x{data[error.start]:02x} at offset {error.start:,}."
            " Convert it first, for example: iconv -f LATIN1 -t UTF-8"
        ) from None


def _text(data: bytes, where: str) -> str:
    """Decode a prompt. A byte order mark says how the file is encoded; it is no part of the text."""
    return _without_last_newline(decode(data.removeprefix(codecs.BOM_UTF8), where))


def _read(file: Path) -> bytes:
    if file.name == "":  # Path('') is the current directory
        raise UsageError("-f: expected a file name, or '-' for standard input.")
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"-f {file} cannot be read: {error.strerror}.") from error


def _without_last_newline(text: str) -> str:
    """Editors and `echo` end a file with a newline that nobody wants continued; it is not part of the prompt."""
    return text.removesuffix("\n").removesuffix("\r")
