"""Ranges of files that are read in pieces into memory of their own, through the reader that experts use too.

A piece is short, so that a demand read never waits long behind one. Pieces begin at multiples of `ALIGNMENT` in the
file, so a block lands in one run of bytes whether or not its file is read with O_DIRECT.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from storage.direct_io import ALIGNMENT, aligned_window
from storage.read_queue import Priority, Ticket
from storage.reader import ExpertReader
from storage.span import ExpertSpan

PIECE_BYTES = 16 * 2**20

_QUEUED_PER_THREAD = 4  # enough to keep every thread busy, few enough to stop soon


@dataclass(frozen=True, slots=True)
class Block:
    """A range of a file."""

    path: Path
    offset: int
    nbytes: int

    @property
    def lead_bytes(self) -> int:
        """Bytes before the payload in the block's window."""
        return self.offset % ALIGNMENT

    @property
    def window_bytes(self) -> int:
        """Bytes of memory, in whole pages, that reading the block takes."""
        return aligned_window(self.offset, self.nbytes)[1]

    def part(self, first: int, nbytes: int) -> "Block":
        """The range of `nbytes` that starts `first` bytes into this one."""
        return Block(self.path, self.offset + first, nbytes)

    def pieces(self, window: memoryview, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[ExpertSpan, memoryview]]:
        """The reads that fill `window` (page-aligned, `window_bytes` long): where each lies, where it goes.

        The payload is then `window[lead_bytes : lead_bytes + nbytes]`.
        """
        start, end = self.offset - self.lead_bytes, self.offset + self.nbytes
        for at in range(start, end, piece_bytes):
            span = ExpertSpan(self.path, ((at, min(piece_bytes, end - at)),))
            yield span, window[at - start : at - start + piece_bytes]


def read_blocks(
    reader: ExpertReader,
    targets: Iterable[tuple[Block, memoryview]],
    landed: Callable[[int, int], None] | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Fill the window of every block, several at a time; `landed(index, nbytes)` after each piece of block `index`.

    Raises the StorageError of the first read that fails; by then nobody writes to a window any more.
    """
    done: SimpleQueue[Ticket] = SimpleQueue()
    waiting: set[Ticket] = set()

    def take_one() -> None:
        ticket = done.get()
        waiting.remove(ticket)
        if ticket.error is not None:
            raise ticket.error
        if landed is not None:
            landed(ticket.key, ticket.span.nbytes)

    try:
        for index, (block, window) in enumerate(targets):
            for span, buffer in block.pieces(window, piece_bytes):
                waiting.add(reader.submit(index, span, buffer, done, Priority.DEMAND))
                if len(waiting) >= reader.n_threads * _QUEUED_PER_THREAD:
                    take_one()
        while waiting:
            take_one()
    finally:
        withdraw(reader, waiting)


def withdraw(reader: ExpertReader, tickets: Iterable[Ticket]) -> None:
    """Cancel what has not started and wait for what has: afterwards nobody writes to these tickets' memory."""
    for ticket in tickets:
        if not reader.cancel(ticket):
            ticket.wait()
