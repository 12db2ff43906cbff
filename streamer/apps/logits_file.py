"""Logits as a .npy file, written while they are computed and given their name only when they are whole."""

import contextlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from streamer.config.errors import UsageError

_HEADER_BYTES = 128  # of the .npy format; its shape is known only at the end, so room is kept


class LogitsFile:
    """float32 [positions, vocab]. `write` in order, then `finish`; without it nothing is left behind.

    Row i holds the logits after token i of prompt + generated tokens, which choose token i + 1. Raises UsageError
    where the file cannot be written, on opening (before a model is loaded) or later.
    """

    def __init__(self, path: Path, vocab_size: int, expected_rows: int) -> None:
        self.path = path
        self.rows = 0
        self._vocab_size = vocab_size
        target = path.resolve()  # the file that a link names is replaced, not the link
        if target.is_dir() or (target.exists() and not target.is_file()):
            raise UsageError(f"--dump-logits {path}: expected a file name, found a directory or device.")
        self._target = target
        self._part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            _remove_stale(target)
            self._file: BinaryIO = self._part.open("xb")
            free = shutil.disk_usage(target.parent).free
        except OSError as error:
            raise self._failed(error) from error
        self._open = True
        needed = _HEADER_BYTES + expected_rows * vocab_size * 4
        if needed > free:
            self.abandon()
            raise UsageError(
                f"--dump-logits {path}: expected {needed / 1e9:.2f} GB of free space for {expected_rows:,} prompt"
                f" positions, found {free / 1e9:.2f} GB. Choose another drive."
            )
        self._put(b"\0" * _HEADER_BYTES)

    def __enter__(self) -> "LogitsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abandon()

    def write(self, first: int, logits: np.ndarray) -> None:
        """Append float32 [n, vocab] of positions `first` and following."""
        assert first == self.rows
        self._put(np.ascontiguousarray(logits, "<f4").tobytes())
        self.rows += len(logits)

    def finish(self) -> None:
        """Complete the header and give the file its name."""
        description = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({self.rows}, {self._vocab_size}), }}"
        magic = b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little")
        header = magic + description.encode().ljust(_HEADER_BYTES - len(magic) - 1) + b"\n"
        try:
            self._file.seek(0)
            self._file.write(header)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.replace(self._target)
        except OSError as error:
            raise self._failed(error) from error
        self._open = False

    def abandon(self) -> None:
        """Remove what was written, unless it is finished. Idempotent."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(OSError):  # the bytes that a full disk did not take are not wanted any more
            self._file.close()
        self.remove_part()

    def remove_part(self) -> None:
        """Remove the temporary file and nothing else: for a signal handler that ends the process."""
        self._part.unlink(missing_ok=True)

    def _put(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            self.abandon()
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> UsageError:
        return UsageError(f"--dump-logits {self.path} cannot be written: {error.strerror}. Nothing was left there.")


def _remove_stale(target: Path) -> None:
    """Remove what processes that were killed left of this target; a part may be of many gigabytes."""
    head, tail = f".{target.name}.", ".part"
    for entry in target.parent.iterdir():
        number = entry.name.removeprefix(head).removesuffix(tail)
        is_part = entry.name == f"{head}{number}{tail}" and number.isascii() and number.isdigit()
        if is_part and not Path("/proc", number).exists():
            with contextlib.suppress(OSError):  # of another user
                entry.unlink()
