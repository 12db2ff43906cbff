"""A ring of memory through which blocks of files are read ahead, in one fixed order that repeats.

Whoever takes the blocks takes them in that order; what has room behind them is on its way already, across the end of
the order too. Taking another block than the next one (a step was cancelled, a read failed) starts the ring again there.
Used by one thread at a time. Knows bytes, not what they mean.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np

from storage.arena import POISON, Arena
from storage.blocks import PIECE_BYTES, Block, withdraw
from storage.direct_io import ALIGNMENT
from storage.errors import StorageError
from storage.read_queue import Priority, State, Ticket
from storage.reader import ExpertReader


@dataclass(slots=True)
class RingCounters:
    """What the ring did so far."""

    bytes_read: int = 0
    wait_s: float = 0.0  # time that `take` stood still
    restarts: int = 0  # times that what was read ahead was thrown away


@dataclass(slots=True, eq=False)
class _Flight:
    """One block on its way, or here."""

    index: int
    start: int  # first byte in the ring, counted on over its end
    tickets: list[Ticket] = field(default_factory=list)
    submitted: bool = False
    waiting: int = 0  # pieces that have not come out of the queue
    error: StorageError | None = None


class BlockRing:
    """Reads `blocks` ahead into `ring_bytes` of memory.

    Args:
        reader: shared with others; not closed here.
        blocks: in the order in which they are taken, over and over.
        ring_bytes: memory; at least the window of the largest block, several of them to read ahead.
        repeat: begin again after the last block. False: it is the last one.
        piece_bytes: most bytes of one read, a multiple of `ALIGNMENT`.
        poison: overwrite what was given back; for tests.

    Raises:
        ValueError: a block does not fit the ring.
        StorageError: the memory cannot be mapped.
    """

    def __init__(
        self,
        reader: ExpertReader,
        blocks: Sequence[Block],
        ring_bytes: int,
        repeat: bool = True,
        piece_bytes: int = PIECE_BYTES,
        poison: bool = False,
    ) -> None:
        ring_bytes -= ring_bytes % ALIGNMENT
        widest = max((block.window_bytes for block in blocks), default=0)
        if widest > ring_bytes:
            raise ValueError(f"expected a ring of at least {widest} bytes, its largest block; got {ring_bytes}")
        self.counters = RingCounters()
        self._reader = reader
        self._blocks = tuple(blocks)
        self._arena = Arena(1, ring_bytes, poison, what="blocks of the trunk")
        self._ring_bytes = ring_bytes
        self._repeat = repeat
        self._piece_bytes = piece_bytes
        self._flights: deque[_Flight] = deque()  # in order; the first is in use or the next to be
        self._first = 0  # number of the first flight, counted on
        self._next: int | None = None  # block to be submitted next; None behind the last one
        self._done: SimpleQueue[Ticket] = SimpleQueue()

    @contextmanager
    def take(self, index: int) -> Iterator[np.ndarray]:
        """Lend the bytes uint8 [nbytes] of a block while the context is open; wait for them where they are not here.

        Raises the StorageError of its read. After that, as after any other block than the next one, the ring starts
        again where it is asked.
        """
        try:
            flight = self._arrive(index)
        except BaseException:
            self._clear()
            raise
        block = self._blocks[index]
        at = flight.start % self._ring_bytes + block.lead_bytes
        try:
            yield self._arena.slot_view(0, at, block.nbytes)
        finally:
            self._release(flight)

    def close(self) -> None:
        """Abandon what is on its way and give the memory back. Idempotent."""
        self._clear()
        self._arena.close()

    def _arrive(self, index: int) -> _Flight:
        """The flight of a block that has landed."""
        front = self._flights[0] if self._flights else None
        if front is None or front.index != index or not front.submitted:
            self.counters.restarts += front is not None
            self._clear()
            self._next = index
        self._fill()
        flight = self._flights[0]
        if flight.waiting:
            self._demand()
            began = time.perf_counter()
            while flight.waiting:
                self._land(self._done.get())
            self.counters.wait_s += time.perf_counter() - began
        if flight.error is not None:
            raise flight.error
        return flight

    def _land(self, ticket: Ticket) -> None:
        flight = self._flights[ticket.key - self._first]
        flight.waiting -= 1
        flight.error = flight.error or ticket.error
        if ticket.landed:
            self.counters.bytes_read += ticket.span.nbytes

    def _demand(self) -> None:
        """Somebody waits: the next reads, as many as can be in flight, go before what only may be wanted."""
        wanted = self._reader.n_threads
        for flight in self._flights:
            for ticket in flight.tickets:
                if ticket.state is not State.DONE:
                    self._reader.promote(ticket)
                    wanted -= 1
                    if wanted == 0:
                        return

    def _release(self, flight: _Flight) -> None:
        if not self._flights or self._flights[0] is not flight:
            return  # the ring was started again while this block was still lent, by an error that kept its frame
        self._flights.popleft()
        self._first += 1
        self._poison(flight)
        self._fill()

    def _fill(self) -> None:
        """Submit the next blocks while there is room for them."""
        while self._next is not None:
            block = self._blocks[self._next]
            start = self._room(block.window_bytes)
            if start is None:
                return
            flight = _Flight(self._next, start)
            self._flights.append(flight)
            at, key = start % self._ring_bytes, self._first + len(self._flights) - 1
            window = self._arena.slot(0)[at : at + block.window_bytes]
            reads = [(key, span, buffer) for span, buffer in block.pieces(window, self._piece_bytes)]
            flight.waiting = len(reads)
            flight.tickets = self._reader.submit_many(reads, self._done, Priority.AHEAD)
            flight.submitted = True
            following = self._next + 1
            self._next = following % len(self._blocks) if self._repeat or following < len(self._blocks) else None

    def _room(self, nbytes: int) -> int | None:
        """Where the next `nbytes` go; None while they would overwrite what is still needed."""
        if not self._flights:
            return 0
        last = self._flights[-1]
        start = last.start + self._blocks[last.index].window_bytes
        left = self._ring_bytes - start % self._ring_bytes
        if left < nbytes:
            start += left  # a block lies in one piece
        return start if start + nbytes <= self._flights[0].start + self._ring_bytes else None

    def _clear(self) -> None:
        """Forget everything that was read ahead; nobody writes to the ring afterwards."""
        for flight in self._flights:
            flight.submitted = False  # should this be interrupted, it is done again
        for flight in self._flights:
            withdraw(self._reader, flight.tickets)
            self._poison(flight)
        self._flights.clear()
        self._done = SimpleQueue()

    def _poison(self, flight: _Flight) -> None:
        if self._arena.poisoning:
            at, nbytes = flight.start % self._ring_bytes, self._blocks[flight.index].window_bytes
            self._arena.slot_view(0, at, nbytes)[:] = POISON
