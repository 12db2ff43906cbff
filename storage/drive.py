"""One drive: what waits for it, the threads that read from it, what it delivered. Drives never wait for each other.

A drive is what the system numbers as a device (st_dev): two partitions of one disk are two drives here, a RAID is one.
"""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from storage.direct_io import FileTable, ReadFn
from storage.errors import StorageError
from storage.read_queue import ReadQueue, Ticket
from storage.span_reader import SpanReader

UNKNOWN_DEVICE = 0  # of a file that is not there: reading it says so


@dataclass(slots=True)
class DriveCounters:
    """What one drive delivered so far. Bytes are as they came from the drive, whole windows included."""

    name: str  # mount point
    depth: int  # reads in flight at most
    reads: int = 0  # experts
    failed: int = 0
    nbytes: int = 0
    busy_s: float = 0.0  # with at least one read in flight

    @property
    def gb_s(self) -> float:
        """GB/s while it was busy; 0 before the first read."""
        return self.nbytes / self.busy_s / 1e9 if self.busy_s else 0.0


def device_of(path: Path) -> int:
    """Return st_dev of the file itself, behind links; of its directory where it is gone, else UNKNOWN_DEVICE."""
    place = _existing(path)
    return UNKNOWN_DEVICE if place is None else place.stat().st_dev


def mount_point(path: Path) -> str:
    """Return the highest directory above a file that is on the file's device: what a person calls the drive."""
    place = _existing(path)
    if place is None:
        return str(path.parent)
    device = place.stat().st_dev
    while place.parent != place and place.parent.stat().st_dev == device:
        place = place.parent
    return str(place)


def _existing(path: Path) -> Path | None:
    for place in (path, path.parent):
        try:
            return place.resolve(strict=True)
        except (OSError, RuntimeError):  # RuntimeError: links in a circle
            continue
    return None


class Drive:
    """A queue of reads with `depth` threads of its own.

    Args:
        name: for counters and thread names.
        depth: reads in flight at most.
        background: reads in flight up to which reads ahead and speculation may start (see `ReadQueue`).
        direct: O_DIRECT where it works.
        read: the read call.

    Raises:
        StorageError: the system has no thread left; none of this drive's runs then.
    """

    def __init__(self, name: str, depth: int, background: int, direct: bool, read: ReadFn) -> None:
        self._counters = DriveCounters(name, depth)
        self._files = FileTable(direct)  # its own: opening a file on a drive that hangs must not hold up the others
        self._read = read
        self._wake = threading.Condition()
        self._queue = ReadQueue(min(background, depth))
        self._busy_since = 0.0
        self._closing = False
        self._threads: list[threading.Thread] = []
        for i in range(depth):
            self._start(i)

    @property
    def depth(self) -> int:
        """Reads in flight at most."""
        return self._counters.depth

    @property
    def fallbacks(self) -> dict[Path, str]:
        """See `FileTable.fallbacks`."""
        return self._files.fallbacks

    @property
    def counters(self) -> DriveCounters:
        """A copy, the reads in flight counted as busy until now."""
        with self._wake:
            running = time.perf_counter() - self._busy_since if self._queue.in_flight else 0.0
            return replace(self._counters, busy_s=self._counters.busy_s + running)

    def put(self, tickets: Iterable[Ticket]) -> None:
        """Queue reads; all of them before the first starts."""
        with self._wake:
            count = 0
            for ticket in tickets:
                self._queue.put(ticket)
                count += 1
            self._wake.notify(count)

    def promote(self, ticket: Ticket) -> None:
        """See `ExpertReader.promote`."""
        with self._wake:
            if self._queue.promote(ticket):
                self._wake.notify()

    def cancel(self, ticket: Ticket) -> bool:
        """See `ExpertReader.cancel`."""
        with self._wake:
            return self._queue.cancel(ticket)

    def close(self) -> None:
        """Fail what has not started and let the threads end; `join` waits for them. Idempotent."""
        with self._wake:
            self._closing = True
            dropped = list(self._queue.drain())
            self._wake.notify_all()
        for ticket in dropped:
            ticket.finish(StorageError(f"{ticket.span.path}: the reader was closed before this read started"))

    def join(self) -> None:
        """Wait for the reads that had started, end the threads, close the files. Idempotent."""
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
            self.join()
            raise StorageError(
                f"expected {self.depth} threads for reading experts, found room for {i}. Raise the limit on memory"
                " or on processes (ulimit -v, ulimit -u, a container's pids limit)."
            ) from error
        self._threads.append(thread)

    def _work(self) -> None:
        spans = SpanReader(self._files, self._read)
        while (ticket := self._take()) is not None:
            error: StorageError | None = StorageError(f"{ticket.span.path}: a reader thread died while reading it")
            nbytes = 0
            try:
                ticket.skip, nbytes = spans.read(ticket.span, ticket.buffer)
                error = None
            except StorageError as failure:
                error = failure
            except (OSError, ValueError, MemoryError) as failure:
                error = StorageError(f"{ticket.span.path}: reading at offset {ticket.span.offset} failed: {failure}")
            finally:
                # Whatever happened, nobody may wait for this ticket for ever.
                self._finish(ticket, error, nbytes)

    def _take(self) -> Ticket | None:
        """Wait for a read that may start; None when the drive is closed."""
        with self._wake:
            while (ticket := self._queue.take()) is None:
                if self._closing:
                    return None
                self._wake.wait()
            if self._queue.in_flight == 1:
                self._busy_since = time.perf_counter()
            return ticket

    def _finish(self, ticket: Ticket, error: StorageError | None, nbytes: int) -> None:
        with self._wake:
            self._queue.finished()
            counters = self._counters
            counters.reads += error is None
            counters.failed += error is not None
            counters.nbytes += nbytes
            if self._queue.in_flight == 0:
                counters.busy_s += time.perf_counter() - self._busy_since
        ticket.finish(error)
