"""A few threads that read spans into buffers: completion order, demand first, cancellable until started.

Knows spans and buffers, not what a cache wants with them. A failed read travels in its ticket and hurts nobody else.
"""

import mmap
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue

from storage.direct_io import (
    FileTable,
    OpenFile,
    ReadFn,
    aligned_buffer,
    aligned_window,
    drop_cached,
    pread,
    pread_full,
)
from storage.errors import StorageError
from storage.read_queue import Priority, ReadQueue, Ticket
from storage.span import ExpertSpan

BACKGROUND = 2  # reads in flight, of any kind, below which reads that nobody waits for yet may start


@dataclass(slots=True)
class ReaderCounters:
    """What was read so far. Bytes are as they came from the drive, whole windows included."""

    reads: int = 0  # experts
    failed: int = 0
    nbytes: int = 0
    nbytes_of: dict[str, int] = field(default_factory=dict)  # per file


class ExpertReader:
    """Reads spans with `n_threads` positional reads in flight.

    Args:
        n_threads: reads in flight, 4 to 16 per drive.
        background: reads in flight up to which reads ahead and speculation may start (see `ReadQueue`).
        direct: O_DIRECT where it works (see `storage.direct_io`).
        read: the read call; tests put delays and faults here.
    """

    def __init__(
        self, n_threads: int = 8, direct: bool = True, read: ReadFn = pread, background: int = BACKGROUND
    ) -> None:
        if n_threads < 1 or background < 1:
            raise ValueError(f"expected at least 1 reader thread and 1 read, got {n_threads} and {background}")
        self.n_threads = n_threads
        self.counters = ReaderCounters()
        self._read = read
        self._files = FileTable(direct)
        self._wake = threading.Condition()
        self._queue = ReadQueue(min(background, n_threads))
        self._closing = False
        self._threads: list[threading.Thread] = []
        for i in range(n_threads):
            self._start(i)

    @property
    def fallbacks(self) -> dict[str, str]:
        """Directories that are read through the page cache although O_DIRECT was asked for, and why. Say it once."""
        return {str(directory): reason for directory, reason in self._files.fallbacks.items()}

    def submit(
        self,
        key: int,
        span: ExpertSpan,
        buffer: memoryview,
        done: "SimpleQueue[Ticket]",
        priority: Priority = Priority.DEMAND,
    ) -> Ticket:
        """Queue one read of `span` into `buffer` (page-aligned, as long as the span's aligned window).

        The ticket appears in `done` when the read is over, failed or not, unless it was cancelled before it started.
        A consumer that waits in `done.get()` uses no CPU. `ticket.skip` says where the payload starts.
        """
        return self.submit_many([(key, span, buffer)], done, priority)[0]

    def submit_many(
        self,
        reads: Iterable[tuple[int, ExpertSpan, memoryview]],
        done: "SimpleQueue[Ticket]",
        priority: Priority = Priority.DEMAND,
    ) -> list[Ticket]:
        """Queue (key, span, buffer) reads in their order, as `submit` does each; return their tickets in that order.

        All are queued before the first starts. Raises RuntimeError when the reader is closed: none is queued.
        """
        tickets = [Ticket(key, span, buffer, done, priority) for key, span, buffer in reads]
        with self._wake:
            if self._closing:
                raise RuntimeError("the reader is closed")
            for ticket in tickets:
                self._queue.put(ticket)
            self._wake.notify(len(tickets))
        return tickets

    def promote(self, ticket: Ticket) -> None:
        """Demand a read that waits with less priority: it moves to the end of the demand queue.

        Does nothing for a ticket that was started, cancelled or demanded already.
        """
        with self._wake:
            if self._queue.promote(ticket):
                self._wake.notify()

    def cancel(self, ticket: Ticket) -> bool:
        """Take back a read that has not started. False: it started, wait for it before its buffer is used again."""
        with self._wake:
            return self._queue.cancel(ticket)

    def close(self) -> None:
        """Fail what has not started, wait for what has, end the threads, close the files. Idempotent."""
        with self._wake:
            self._closing = True
            dropped = list(self._queue.drain())
            self._wake.notify_all()
        for ticket in dropped:
            ticket.finish(StorageError(f"{ticket.span.path}: the reader was closed before this read started"))
        for thread in self._threads:
            thread.join()
        self._files.close()

    def _start(self, i: int) -> None:
        """Start thread `i`; where the system has none left, end those that run."""
        thread = threading.Thread(target=self._work, name=f"expert-reader-{i}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self.close()
            raise StorageError(
                f"expected {self.n_threads} threads for reading experts, found room for {i}. Raise the limit on memory"
                " or on processes (ulimit -v, ulimit -u, a container's pids limit)."
            ) from error
        self._threads.append(thread)

    def _work(self) -> None:
        bounce: mmap.mmap | None = None  # of this thread: where the window of one piece lands
        while True:
            with self._wake:
                while (ticket := self._queue.take()) is None:
                    if self._closing:
                        return
                    self._wake.wait()
            error: StorageError | None = StorageError(f"{ticket.span.path}: a reader thread died while reading it")
            try:
                bounce = _bounce_for(ticket.span, bounce)
                self._serve(ticket, bounce)
                error = None
            except StorageError as failure:
                error = failure
            except (OSError, ValueError, MemoryError) as failure:
                error = StorageError(f"{ticket.span.path}: reading at offset {ticket.span.offset} failed: {failure}")
            finally:
                # Whatever happened, nobody may wait for this ticket for ever.
                with self._wake:
                    self._queue.finished()
                    self.counters.reads += error is None
                    self.counters.failed += error is not None
                ticket.finish(error)

    def _serve(self, ticket: Ticket, bounce: mmap.mmap | None) -> None:
        span = ticket.span
        file = self._files.acquire(span.path)
        try:
            if len(span.pieces) == 1:
                ticket.skip = self._read_window(file, *span.pieces[0], ticket.buffer)
            else:
                assert bounce is not None
                self._gather(file, span, ticket.buffer, bounce)
        finally:
            self._files.release(span.path)

    def _gather(self, file: OpenFile, span: ExpertSpan, buffer: memoryview, bounce: mmap.mmap) -> None:
        """Bring scattered pieces into canonical order, each through an aligned window of its own."""
        if span.nbytes > len(buffer):
            raise StorageError(f"{file.path}: an expert of {span.nbytes} bytes does not fit a buffer of {len(buffer)}")
        window = memoryview(bounce)
        at = 0
        for offset, nbytes in span.pieces:
            skip = self._read_window(file, offset, nbytes, window)
            buffer[at : at + nbytes] = window[skip : skip + nbytes]
            at += nbytes

    def _read_window(self, file: OpenFile, offset: int, nbytes: int, buffer: memoryview) -> int:
        """Read a range into the buffer; return where in the buffer it starts."""
        start, length = aligned_window(offset, nbytes) if file.direct else (offset, nbytes)
        skip = offset - start
        if length > len(buffer):
            raise StorageError(f"{file.path}: a window of {length} bytes does not fit a buffer of {len(buffer)}")
        got = pread_full(file, buffer[:length], start, skip + nbytes, self._read)
        drop_cached(file, start, length)
        with self._wake:
            self.counters.nbytes += got
            self.counters.nbytes_of[str(file.path)] = self.counters.nbytes_of.get(str(file.path), 0) + got
        return skip


def _bounce_for(span: ExpertSpan, bounce: mmap.mmap | None) -> mmap.mmap | None:
    """Return a buffer for the widest window of a scattered span: the one there is, if it is wide enough."""
    if len(span.pieces) == 1:
        return bounce
    widest = max(aligned_window(*piece)[1] for piece in span.pieces)
    return bounce if bounce is not None and len(bounce) >= widest else aligned_buffer(widest)
