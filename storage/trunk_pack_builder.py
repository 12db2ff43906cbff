"""Builds a pack: resumable, one process at a time, under its name only when it is complete.

Rows are written as they are made, by a thread of its own; a matrix counts as built once its bytes are on the drive and
its sums are in the header. What was built before is summed again when a build is resumed.
"""

import errno
import fcntl
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from storage.errors import StorageError
from storage.trunk_pack import PackLayout, PackMatrix

# Given the matrices that are missing, yields (rows uint8 [n, row_bytes], scales float32 [n]) of the first one from its
# first row on, then of the next one.
Produce = Callable[[Sequence[PackMatrix]], Iterator[tuple[np.ndarray, np.ndarray]]]

SYNC_BYTES = 256 * 2**20  # a killed build loses at most this much
_CHECK_BYTES = 64 * 2**20
_QUEUED = 2  # row blocks made but not written


def build_pack(
    path: Path,
    layout: PackLayout,
    produce: Produce,
    progress: Callable[[int, int], None] | None = None,
    sync_bytes: int = SYNC_BYTES,
) -> None:
    """Build the pack at `path`, or what is missing of it. `progress` is called with (bytes, bytes in all).

    Raises StorageError: no room, not writable, built by another process right now; what is done already is kept beside
    `path`, under the suffix .partial. What `produce` raises passes through.
    """
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, partial)
            if path.exists():  # another process finished it while this one was on its way here
                partial.unlink(missing_ok=True)
                return
            _build(descriptor, path, layout, produce, progress, sync_bytes)
            partial.replace(path)
            _sync_directory(path.parent)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(_sentence(error, path, layout)) from error


def _build(
    descriptor: int,
    path: Path,
    layout: PackLayout,
    produce: Produce,
    progress: Callable[[int, int], None] | None,
    sync_bytes: int,
) -> None:
    done = _resume(descriptor, layout)
    _check_room(descriptor, path, layout)
    os.ftruncate(descriptor, layout.nbytes)
    writer = _Writer(descriptor, layout, done, sync_bytes)
    total = sum(matrix.nbytes for matrix in layout.matrices)
    written = sum(matrix.nbytes for matrix in layout.matrices[:done])
    with ThreadPoolExecutor(1) as pool:
        queued: list[Future[None]] = []
        for rows, scales in produce(layout.matrices[done:]):
            if len(queued) == _QUEUED:
                queued.pop(0).result()
            queued.append(pool.submit(writer.write, rows, scales))
            written += rows.nbytes
            if progress is not None:
                progress(written, total)
        for future in queued:
            future.result()
    writer.finish()


class _Writer:
    """Writes row blocks in order. Used by one thread at a time."""

    def __init__(self, descriptor: int, layout: PackLayout, done: int, sync_bytes: int) -> None:
        self._descriptor = descriptor
        self._layout = layout
        self._matrix = done
        self._row = 0
        self._sums = (0, 0)
        self._sync_bytes = sync_bytes
        self._unsynced: list[tuple[int, tuple[int, int]]] = []  # (matrix, its sums)

    def write(self, rows: np.ndarray, scales: np.ndarray) -> None:
        """Write the next rows, and book their matrix when it is complete."""
        matrix, i = self._layout.matrices[self._matrix], self._matrix
        assert rows.dtype == np.uint8
        assert rows.shape == (len(scales), matrix.row_bytes)
        _write_all(self._descriptor, rows.data.cast("B"), self._layout.rows_at(i) + self._row * matrix.row_bytes)
        scale_bytes = scales.astype("<f4", copy=False).data.cast("B")
        _write_all(self._descriptor, scale_bytes, self._layout.scales_at(i) + 4 * self._row)
        self._sums = zlib.crc32(rows.data, self._sums[0]), zlib.crc32(scale_bytes, self._sums[1])
        self._row += len(scales)
        assert self._row <= matrix.rows
        if self._row == matrix.rows:
            self._unsynced.append((i, self._sums))
            self._matrix, self._row, self._sums = i + 1, 0, (0, 0)
            if sum(self._layout.matrices[i].nbytes for i, _ in self._unsynced) >= self._sync_bytes:
                self._sync()

    def finish(self) -> None:
        """Book the last matrices; everything is on the drive afterwards."""
        assert self._matrix == len(self._layout.matrices), "rows are missing"
        self._sync()
        os.fsync(self._descriptor)

    def _sync(self) -> None:
        os.fdatasync(self._descriptor)  # first the bytes, then the sums that vouch for them
        for i, sums in self._unsynced:
            _write_all(self._descriptor, memoryview(b"%08x%08x" % sums), self._layout.sums_at(i))
            size = self._layout.matrices[i].nbytes
            os.posix_fadvise(self._descriptor, self._layout.rows_at(i), size, os.POSIX_FADV_DONTNEED)
        self._unsynced.clear()


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def _lock(descriptor: int, partial: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(
            f"{partial} is being written by another process. Wait until that one has built it, then start again."
        ) from error


def _resume(descriptor: int, layout: PackLayout) -> int:
    """How many matrices, from the first on, an earlier build left whole; the file begins with a right header then."""
    try:
        sums = layout.sums(os.pread(descriptor, len(layout.header), 0))
    except StorageError:
        os.ftruncate(descriptor, 0)  # nothing yet, or of another version
        _write_all(descriptor, memoryview(layout.header), 0)
        return 0
    for i, pair in enumerate(sums):
        matrix = layout.matrices[i]
        if pair is None or pair != (
            _sum_of(descriptor, layout.rows_at(i), matrix.nbytes),
            _sum_of(descriptor, layout.scales_at(i), 4 * matrix.rows),
        ):
            return i
    return len(sums)


def _sum_of(descriptor: int, offset: int, nbytes: int) -> int:
    total = done = 0
    while done < nbytes:
        part = os.pread(descriptor, min(_CHECK_BYTES, nbytes - done), offset + done)
        if not part:
            break
        total, done = zlib.crc32(part, total), done + len(part)
    return total


def _check_room(descriptor: int, path: Path, layout: PackLayout) -> None:
    volume = os.statvfs(path.parent)
    free, there = volume.f_bavail * volume.f_frsize, os.fstat(descriptor).st_blocks * 512
    needed = layout.nbytes - there
    if needed > free:
        raise StorageError(
            f"The {layout.format} trunk needs {needed / 1e9:.2f} GB more in {path.parent}, {free / 1e9:.2f} GB are "
            "free. Make room there, or choose the format bf16, which needs no pack."
        )


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)  # the new name too survives a power cut
    finally:
        os.close(descriptor)


def _sentence(error: OSError, path: Path, layout: PackLayout) -> str:
    tried = f"The {layout.format} trunk cannot be written to {path.parent}: {error.strerror}."
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{tried} It takes {layout.nbytes / 1e9:.2f} GB. What is done is kept: make room and start again."
    return f"{tried} Expected a directory that this user may write to; or choose the format bf16, which needs no pack."
