from pathlib import Path
from queue import SimpleQueue

from hypothesis import given
from hypothesis import strategies as st

from storage.read_queue import Priority, ReadQueue, State, Ticket
from storage.span import ExpertSpan

SPAN = ExpertSpan(Path("shard"), ((0, 1),))


def ticket(key, priority):
    return Ticket(key, SPAN, memoryview(b""), SimpleQueue(), priority)


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "take", "finished", "promote", "cancel"]), st.integers(0, 30)), max_size=60
)


@given(STEPS, st.integers(1, 4))
def test_the_queue_is_three_lists_and_a_bound(steps, background):
    """Against the plain definition: three lists, demand first, the others only below the bound."""
    queue, lists, tickets, in_flight = ReadQueue(background), ([], [], []), [], 0
    for step, number in steps:
        chosen = tickets[number % len(tickets)] if tickets else None
        place = next((waiting for waiting in lists if chosen in waiting), None)
        if step == "put":
            tickets.append(ticket(len(tickets), Priority(number % 3)))
            lists[number % 3].append(tickets[-1])
            queue.put(tickets[-1])
        elif step == "take":
            allowed = lists if in_flight < background else lists[:1]
            want = next((waiting.pop(0) for waiting in allowed if waiting), None)
            assert queue.take() is want
            in_flight += want is not None
        elif step == "finished" and in_flight:
            in_flight -= 1
            queue.finished()
        elif step == "promote" and chosen is not None:
            moves = place is not None and place is not lists[0]
            assert queue.promote(chosen) == moves
            if moves:
                place.remove(chosen)
                lists[0].append(chosen)
        elif step == "cancel" and chosen is not None:
            was = chosen.state
            assert queue.cancel(chosen) == (place is not None or was is State.CANCELLED)
            if place is not None:
                place.remove(chosen)
    assert list(queue.drain()) == [*lists[0], *lists[1], *lists[2]]
    assert queue.take() is None
