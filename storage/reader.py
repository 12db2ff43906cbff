"""Reads spans into buffers, each drive with threads of its own: completion order, demand first, cancellable.

Knows spans and buffers, not what a cache wants with them. A failed read travels in its ticket and hurts nobody else.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from storage.direct_io import ReadFn, pread
from storage.drive import Drive, DriveCounters, device_of, mount_point
from storage.errors import StorageError
from storage.read_queue import Priority, Ticket
from storage.span import ExpertSpan

BACKGROUND = 2  # reads in flight, of any kind, below which reads that nobody waits for yet may start


@dataclass(frozen=True, slots=True)
class ReaderCounters:
    """What was read so far, by drive and in all."""

    drives: tuple[DriveCounters, ...]

    @property
    def reads(self) -> int:
        """Experts that were read."""
        return sum(drive.reads for drive in self.drives)

    @property
    def failed(self) -> int:
        """Experts that could not be read."""
        return sum(drive.failed for drive in self.drives)

    @property
    def nbytes(self) -> int:
        """Bytes that came from the drives."""
        return sum(drive.nbytes for drive in self.drives)


class ExpertReader:
    """Reads spans with so many positional reads in flight on each drive.

    Args:
        depth: reads in flight on a drive that `depths` does not name, 4 to 16.
        background: reads in flight on a drive up to which reads ahead and speculation may start (see `ReadQueue`).
        direct: O_DIRECT where it works (see `storage.direct_io`).
        read: the read call; tests put delays and faults here.
        files: their drives get their threads now; another drive at its first read.
        depths: device (see `drive.device_of`) → reads in flight, as measured (see `storage.probe`).

    Raises:
        StorageError: the system has no room for the threads.
    """

    def __init__(
        self,
        depth: int = 8,
        direct: bool = True,
        read: ReadFn = pread,
        background: int = BACKGROUND,
        files: Iterable[Path] = (),
        depths: Mapping[int, int] | None = None,
    ) -> None:
        self._depths = dict(depths or {})
        if min(depth, background, *self._depths.values()) < 1:
            raise ValueError(f"expected at least 1 read in flight, got {depth}, {background} and {self._depths}")
        self._depth = depth
        self._background = background
        self._read = read
        self._direct = direct
        self._lock = threading.Lock()  # taken before a drive's, never by a reader thread
        self._drives: dict[int, Drive] = {}
        self._drive_of: dict[Path, Drive] = {}
        self._closing = False
        try:
            for path in files:
                self._drive(path)
        except StorageError:
            self.close()
            raise

    @property
    def n_threads(self) -> int:
        """Reads in flight at most, on all drives that are known."""
        return sum(drive.depth for drive in self._drives.values()) or self._depth

    @property
    def counters(self) -> ReaderCounters:
        """What was read until now."""
        with self._lock:
            return ReaderCounters(tuple(drive.counters for drive in self._drives.values()))

    @property
    def fallbacks(self) -> dict[str, str]:
        """Directories that are read through the page cache although O_DIRECT was asked for, and why. Say it once."""
        with self._lock:
            found = [drive.fallbacks for drive in self._drives.values()]
        return {str(directory): reason for fallbacks in found for directory, reason in fallbacks.items()}

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

        On each drive all are queued before the first starts. None is queued where this raises: RuntimeError when the
        reader is closed, StorageError when a drive that was not known has no room for its threads.
        """
        tickets = [Ticket(key, span, buffer, done, priority) for key, span, buffer in reads]
        with self._lock:
            if self._closing:
                raise RuntimeError("the reader is closed")
            of_drive: dict[Drive, list[Ticket]] = {}
            for ticket in tickets:
                of_drive.setdefault(self._drive(ticket.span.path), []).append(ticket)
            for drive, its_tickets in of_drive.items():
                drive.put(its_tickets)
        return tickets

    def promote(self, ticket: Ticket) -> None:
        """Demand a read that waits with less priority: it moves to the end of its drive's demand queue.

        Does nothing for a ticket that was started, cancelled or demanded already.
        """
        self._drive_of[ticket.span.path].promote(ticket)

    def cancel(self, ticket: Ticket) -> bool:
        """Take back a read that has not started. False: it started, wait for it before its buffer is used again."""
        return self._drive_of[ticket.span.path].cancel(ticket)

    def close(self) -> None:
        """Fail what has not started, wait for what has, end the threads, close the files. Idempotent."""
        with self._lock:
            self._closing = True
            drives = list(self._drives.values())
        for drive in drives:
            drive.close()
        for drive in drives:
            drive.join()

    def _drive(self, path: Path) -> Drive:
        """Return the drive that holds a file, as it was found when the file was first read."""
        if path not in self._drive_of:
            device = device_of(path)
            if device not in self._drives:
                depth = self._depths.get(device, self._depth)
                self._drives[device] = Drive(mount_point(path), depth, self._background, self._direct, self._read)
            self._drive_of[path] = self._drives[device]
        return self._drive_of[path]
