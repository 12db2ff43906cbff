"""What waits to be read, by priority, and what may start next. Not locked: the reader holds one lock around it."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from queue import SimpleQueue

from storage.errors import StorageError
from storage.span import ExpertSpan


class Priority(IntEnum):
    """Who waits for the bytes. A lower number goes first."""

    DEMAND = 0  # the layer at work
    AHEAD = 1  # certain to be wanted: the next blocks of a streamed trunk
    SPECULATION = 2  # predicted experts


class State(Enum):
    """Life of a ticket."""

    WAITING = "waiting"
    STARTED = "started"
    DONE = "done"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Ticket:
    """One read on its way. Fields are the consumer's once the ticket came out of its queue."""

    key: int
    span: ExpertSpan
    buffer: memoryview
    done: "SimpleQueue[Ticket]"
    priority: Priority = Priority.DEMAND
    skip: int = 0  # first payload byte in the buffer
    error: StorageError | None = None
    state: State = State.WAITING
    _finished: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Return when the read is over and nobody writes to the buffer any more."""
        self._finished.wait()

    def finish(self, error: StorageError | None) -> None:
        """Hand the ticket over to whoever waits for it."""
        self.error = error
        self.state = State.DONE
        self._finished.set()
        self.done.put(self)

    @property
    def over(self) -> bool:
        """Whether the read has ended, well or not: nobody writes to the buffer any more."""
        return self.state is State.DONE

    @property
    def landed(self) -> bool:
        """Whether the payload is complete in the buffer."""
        return self.over and self.error is None


class ReadQueue:
    """Tickets that wait, first come first served within a priority; every operation takes constant time.

    A read cannot be interrupted, so what is not demanded starts only while fewer than `background` reads of any kind
    are in flight: it fills a drive that demand leaves idle, and a demand read that comes now shares the drive with
    at most that many.
    """

    def __init__(self, background: int) -> None:
        self.background = background
        self.in_flight = 0
        self._waiting: dict[Priority, OrderedDict[Ticket, None]] = {priority: OrderedDict() for priority in Priority}

    def put(self, ticket: Ticket) -> None:
        """Append a ticket to the queue of its priority."""
        self._waiting[ticket.priority][ticket] = None

    def take(self) -> Ticket | None:
        """Start the next ticket, or return None where none may start now."""
        for priority, waiting in self._waiting.items():
            if waiting and (priority is Priority.DEMAND or self.in_flight < self.background):
                ticket, _ = waiting.popitem(last=False)
                ticket.state = State.STARTED
                self.in_flight += 1
                return ticket
        return None

    def finished(self) -> None:
        """Note that a started read is over; what waits may start now."""
        self.in_flight -= 1

    def promote(self, ticket: Ticket) -> bool:
        """Move a waiting ticket to the end of the demand queue; False where it does not wait, or not behind demand."""
        if ticket.state is not State.WAITING or ticket.priority is Priority.DEMAND:
            return False
        del self._waiting[ticket.priority][ticket]
        ticket.priority = Priority.DEMAND
        self.put(ticket)
        return True

    def cancel(self, ticket: Ticket) -> bool:
        """Take a waiting ticket out; True where it is cancelled, now or earlier."""
        if ticket.state is State.WAITING:
            del self._waiting[ticket.priority][ticket]
            ticket.state = State.CANCELLED
        return ticket.state is State.CANCELLED

    def drain(self) -> Iterator[Ticket]:
        """Take out everything that waits, as if it had started."""
        for waiting in self._waiting.values():
            while waiting:
                ticket, _ = waiting.popitem(last=False)
                ticket.state = State.STARTED
                yield ticket
