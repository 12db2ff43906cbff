"""O_DIRECT where one real read proves that it works, else buffered; and reads that end only when they are complete.

Opening with O_DIRECT proves nothing: zfs and tmpfs refuse at open, overlayfs over squashfs lets the open pass and
fails the read. So the first file of a directory is asked for one aligned block. A directory that cannot do it is read
through the page cache and reported once (`FileTable.fallbacks`).
"""

import errno
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storage.errors import DirectReadRefusedError, StorageError

ALIGNMENT = 4096  # offset, length and memory: a multiple of every logical block size in use
ReadFn = Callable[[int, memoryview, int], int]  # (fd, buffer, offset) → bytes read; the seam where tests inject faults

_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # how file systems say that they do not read with O_DIRECT
_MAX_STALLS = 8  # reads in a row without progress before a file that is long enough is given up


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file open for positional reads."""

    path: Path
    fd: int
    direct: bool


def pread(fd: int, buffer: memoryview, offset: int) -> int:
    """Read once at `offset` into `buffer`; may be short. Releases the GIL."""
    return os.preadv(fd, [buffer], offset)


def aligned_window(offset: int, nbytes: int) -> tuple[int, int]:
    """Return (start, length) of the aligned window around a range: [floor(offset), ceil(offset + nbytes)).

    At the end of a file the window reaches past the last byte: reading it is short by design.
    """
    start = offset - offset % ALIGNMENT
    end = -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT
    return start, end - start


def aligned_buffer(nbytes: int) -> mmap.mmap:
    """Return fresh page-aligned anonymous memory of at least `nbytes`, rounded up to whole pages."""
    return mmap.mmap(-1, max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT)


def probe_direct(path: Path) -> str | None:
    """Return None when one aligned O_DIRECT read of `path` works and returns the file's bytes, else the reason."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return "this platform has no O_DIRECT"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    except OSError as error:
        return f"opening with O_DIRECT failed: {error.strerror}"
    try:
        with aligned_buffer(ALIGNMENT) as block, memoryview(block) as view:
            got = pread(fd, view, 0)
            if got != min(ALIGNMENT, os.fstat(fd).st_size) or got == 0:
                return f"an O_DIRECT read of {ALIGNMENT} bytes returned {got}"
            with open(path, "rb", buffering=0) as buffered:
                same = buffered.read(got) == view[:got]
            return None if same else "an O_DIRECT read returned other bytes than a buffered one"
    except OSError as error:
        return f"reading with O_DIRECT failed: {error.strerror}"
    finally:
        _close_quietly(fd)


def pread_full(file: OpenFile, buffer: memoryview, offset: int, need: int, read: ReadFn = pread) -> int:
    """Fill `buffer` from `offset` until at least `need` bytes are there; return the bytes read.

    Retries EINTR and short reads. With O_DIRECT `buffer` and `offset` are aligned, and a short read resumes at a block
    boundary, because an unaligned offset would be refused.

    Raises:
        StorageError: the file ends before `need` bytes, or the drive fails; with file, offset, expected and got.
        DirectReadRefusedError: O_DIRECT worked before and does not now; see `FileTable.distrust`.
    """
    got = stalls = 0
    while got < need:
        try:
            n = read(file.fd, buffer[got:], offset + got)
        except InterruptedError:
            continue
        except OSError as error:
            if file.direct and error.errno in _REFUSALS:
                raise DirectReadRefusedError(
                    f"{file.path}: O_DIRECT worked, and then reading {need} bytes at offset {offset} was refused after "
                    f"{got}: {error.strerror} (errno {error.errno}). The next read tests the file again and goes "
                    "through the page cache where it must: ask again"
                ) from error
            raise StorageError(
                f"{file.path}: reading {need} bytes at offset {offset} failed after {got}: {error.strerror or error} "
                f"(errno {error.errno}); check the drive and its file system, then fetch this file again"
            ) from error
        if got + n >= need:
            return got + n
        reached = got + n
        progress = reached - reached % ALIGNMENT if file.direct else reached
        stalls = 0 if progress > got else stalls + 1
        if n == 0 or stalls == _MAX_STALLS:
            raise StorageError(_incomplete(file, offset, need, reached))
        got = progress
    return got


def _incomplete(file: OpenFile, offset: int, need: int, got: int) -> str:
    size = os.fstat(file.fd).st_size
    where = f"expected {need} bytes at offset {offset}, got {got}"
    if size < offset + need:
        return f"{file.path}: file truncated: {where}; the file ends at {size}, fetch it again"
    return f"{file.path}: short reads: {where}, {_MAX_STALLS} times; check the drive and its file system"


class FileTable:
    """Descriptors, opened on first use and kept; the least recently used idle one is closed beyond `limit`.

    Args:
        direct: try O_DIRECT. False reads everything through the page cache.
        limit: most descriptors to keep (a released checkpoint has 96 shards).
    """

    def __init__(self, direct: bool = True, limit: int = 128) -> None:
        self._direct = direct
        self._limit = limit
        self._lock = threading.Lock()
        self._files: dict[Path, OpenFile] = {}  # least recently used first
        self._users: dict[Path, int] = {}
        self._verdicts: dict[Path, str | None] = {}  # directory → why not direct
        self._retired: list[OpenFile] = []  # distrusted, but perhaps in use

    @property
    def fallbacks(self) -> dict[Path, str]:
        """Directories read through the page cache although O_DIRECT was asked for, and why."""
        with self._lock:
            return {directory: reason for directory, reason in self._verdicts.items() if reason is not None}

    def acquire(self, path: Path) -> OpenFile:
        """Return the open file; it stays open until `release`. Raises StorageError when it cannot be opened."""
        with self._lock:
            file = self._files.pop(path, None) or self._open(path)
            self._files[path] = file
            self._users[path] = self._users.get(path, 0) + 1
            idle = [p for p in self._files if not self._users.get(p)]
            for victim in idle[: max(0, len(self._files) - self._limit)]:
                _close_quietly(self._files.pop(victim).fd)
            return file

    def release(self, path: Path) -> None:
        """Give a file back."""
        with self._lock:
            self._users[path] -= 1
            if not self._users[path]:
                for file in [file for file in self._retired if file.path == path]:
                    self._retired.remove(file)
                    _close_quietly(file.fd)

    def distrust(self, path: Path) -> None:
        """Forget that O_DIRECT works in the directory of `path`: its files are opened and tested anew."""
        directory = path.resolve().parent
        with self._lock:
            self._verdicts.pop(directory, None)
            for file in [file for file in self._files.values() if file.path.resolve().parent == directory]:
                del self._files[file.path]
                self._retired.append(file)

    def close(self) -> None:
        """Close every descriptor. Idempotent; nobody may be reading."""
        with self._lock:
            for file in (*self._files.values(), *self._retired):
                _close_quietly(file.fd)
            self._files.clear()
            self._retired.clear()
            self._users.clear()

    def _open(self, path: Path) -> OpenFile:
        directory = path.resolve().parent  # of the file itself: downloads are often links to another drive
        if self._direct and directory not in self._verdicts and path.exists():
            self._verdicts[directory] = probe_direct(path)
        direct = self._direct and self._verdicts.get(directory) is None
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            fd = os.open(path, flags)
        except OSError as error:
            raise StorageError(
                f"{path}: cannot be opened: {error.strerror} (errno {error.errno}); "
                "expected a readable file, check that the shard is there and its permissions"
            ) from error
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # one read per expert: read-ahead would be waste
        return OpenFile(path, fd, direct)


def drop_cached(file: OpenFile, offset: int, nbytes: int) -> None:
    """Tell the kernel not to keep a buffered range: the arena has it now, twice would break the budget."""
    if not file.direct:
        os.posix_fadvise(file.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _close_quietly(fd: int) -> None:
    # Some overlay file systems report their O_DIRECT trouble at close; nothing was written, nothing is lost.
    try:
        os.close(fd)
    except OSError:
        return
