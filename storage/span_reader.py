"""Reads the pieces of one span into a buffer, in canonical order. One object a thread: it owns a bounce buffer."""

import mmap

from storage.direct_io import (
    FileTable,
    OpenFile,
    ReadFn,
    aligned_buffer,
    aligned_window,
    drop_cached,
    pread_full,
)
from storage.errors import DirectReadRefusedError, StorageError
from storage.span import ExpertSpan


class SpanReader:
    """Reads spans through a shared table of files with one read call."""

    def __init__(self, files: FileTable, read: ReadFn) -> None:
        self._files = files
        self._read = read
        self._bounce: mmap.mmap | None = None  # where the window of one piece lands before it is moved into place

    def read(self, span: ExpertSpan, buffer: memoryview) -> tuple[int, int]:
        """Read a span; return (first payload byte in the buffer, bytes that came from the drive).

        Raises StorageError with file, offset, expected and got.
        """
        file = self._files.acquire(span.path)
        try:
            if len(span.pieces) == 1:
                return self._window(file, *span.pieces[0], buffer)
            return 0, self._gather(file, span, buffer)
        except DirectReadRefusedError:
            self._files.distrust(span.path)
            raise
        finally:
            self._files.release(span.path)

    def _gather(self, file: OpenFile, span: ExpertSpan, buffer: memoryview) -> int:
        """Bring scattered pieces into canonical order, each through an aligned window of its own."""
        if span.nbytes > len(buffer):
            raise StorageError(f"{file.path}: an expert of {span.nbytes} bytes does not fit a buffer of {len(buffer)}")
        widest = max(aligned_window(*piece)[1] for piece in span.pieces)
        if self._bounce is None or len(self._bounce) < widest:
            self._bounce = aligned_buffer(widest)
        at = from_drive = 0
        with memoryview(self._bounce) as window:
            for offset, nbytes in span.pieces:
                skip, got = self._window(file, offset, nbytes, window)
                buffer[at : at + nbytes] = window[skip : skip + nbytes]
                at += nbytes
                from_drive += got
        return from_drive

    def _window(self, file: OpenFile, offset: int, nbytes: int, buffer: memoryview) -> tuple[int, int]:
        """Read a range into the buffer; return where in the buffer it starts, and the bytes read."""
        start, length = aligned_window(offset, nbytes) if file.direct else (offset, nbytes)
        skip = offset - start
        if length > len(buffer):
            raise StorageError(f"{file.path}: a window of {length} bytes does not fit a buffer of {len(buffer)}")
        got = pread_full(file, buffer[:length], start, skip + nbytes, self._read)
        drop_cached(file, start, length)
        return skip, got
