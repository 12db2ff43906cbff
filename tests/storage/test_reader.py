import errno
import os
import random
import threading
import time
from queue import SimpleQueue

import pytest

from storage.arena import Arena
from storage.direct_io import pread
from storage.errors import StorageError
from storage.read_queue import Priority, State
from storage.reader import ExpertReader
from storage.span import ExpertSpan

NBYTES = 9001


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(3 + 20 * NBYTES))
    return path


def one_piece(path, i):
    return ExpertSpan(path, ((3 + i * NBYTES, NBYTES),))


def six_pieces(path, i):
    """Canonical order is not file order."""
    first, sixth = 3 + i * NBYTES, NBYTES // 6
    cuts = [(first + p * sixth, sixth if p < 5 else NBYTES - 5 * sixth) for p in range(6)]
    return ExpertSpan(path, tuple(cuts[p] for p in (4, 5, 0, 1, 2, 3)))


def expected(span):
    data = span.path.read_bytes()
    return b"".join(data[offset : offset + nbytes] for offset, nbytes in span.pieces)


class Gate:
    """A read call that waits until it is opened."""

    def __init__(self):
        self.opened, self.entered = threading.Event(), threading.Semaphore(0)

    def __call__(self, fd, buffer, offset):
        self.entered.release()
        assert self.opened.wait(10)
        return pread(fd, buffer, offset)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("span_of", [one_piece, six_pieces])
def test_every_byte_lands_in_canonical_order(shard, direct, span_of):
    rng = random.Random(1)

    def read(fd, buffer, offset):
        time.sleep(rng.random() * 0.002)
        return pread(fd, buffer, offset)

    arena, done, reader = Arena(20, NBYTES), SimpleQueue(), ExpertReader(4, direct, read)
    for i in range(20):
        reader.submit(i, span_of(shard, i), arena.slot(i), done)
    order = []
    for _ in range(20):
        ticket = done.get(timeout=10)
        assert ticket.landed
        assert arena.slot_view(ticket.key, ticket.skip, NBYTES).tobytes() == expected(ticket.span)
        order.append(ticket.key)
    assert sorted(order) == list(range(20))
    assert reader.counters.reads == 20
    (drive,) = reader.counters.drives
    assert os.path.ismount(drive.name)
    assert reader.counters.nbytes == drive.nbytes >= 20 * NBYTES
    reader.close()


def test_demand_goes_before_speculation_and_what_waits_can_be_cancelled(shard):
    gate, arena, done = Gate(), Arena(5, NBYTES), SimpleQueue()
    reader = ExpertReader(1, read=gate)
    first = reader.submit(0, one_piece(shard, 0), arena.slot(0), done)
    assert gate.entered.acquire(timeout=10)
    guess = reader.submit(1, one_piece(shard, 1), arena.slot(1), done, Priority.SPECULATION)
    demand = [reader.submit(i, one_piece(shard, i), arena.slot(i), done) for i in (2, 3, 4)]
    assert not reader.cancel(first)
    assert reader.cancel(demand[1])
    assert reader.cancel(demand[1])
    gate.opened.set()
    assert [done.get(timeout=10).key for _ in range(4)] == [0, 2, 4, 1]
    first.wait()
    assert guess.landed
    assert not demand[1].landed
    assert not reader.cancel(guess)
    reader.close()
    assert done.empty()


def test_many_reads_start_in_their_order_and_a_promoted_one_after_what_is_demanded(shard):
    gate, arena, done = Gate(), Arena(8, NBYTES), SimpleQueue()
    reader = ExpertReader(1, read=gate)
    reader.submit(0, one_piece(shard, 0), arena.slot(0), done)
    assert gate.entered.acquire(timeout=10)

    def reads(*keys):
        return [(key, one_piece(shard, key), arena.slot(key)) for key in keys]

    guesses = reader.submit_many(reads(1, 2), done, Priority.SPECULATION)
    (ahead,) = reader.submit_many(reads(3), done, Priority.AHEAD)
    demand = reader.submit_many(reads(5, 4), done)
    assert [ticket.key for ticket in demand] == [5, 4]
    reader.promote(guesses[1])
    reader.promote(demand[0])  # demanded already: keeps its place
    assert reader.cancel(guesses[0])
    reader.promote(guesses[0])
    assert reader.submit_many([], done) == []
    gate.opened.set()
    assert [done.get(timeout=10).key for _ in range(5)] == [0, 5, 4, 2, 3]
    assert ahead.landed
    reader.promote(ahead)
    reader.close()
    assert done.empty()
    with pytest.raises(RuntimeError, match="closed"):
        reader.submit_many(reads(6), done)


def test_a_demand_read_always_finds_a_thread_that_speculation_does_not_hold(shard):
    gate, arena, done = Gate(), Arena(20, NBYTES), SimpleQueue()
    reader = ExpertReader(4, read=gate, background=2)
    guesses = [(i, one_piece(shard, i), arena.slot(i)) for i in range(8)]
    reader.submit_many(guesses, done, Priority.SPECULATION)
    assert all(gate.entered.acquire(timeout=10) for _ in range(2))
    assert not gate.entered.acquire(timeout=0.05)  # no third
    demand = reader.submit_many([(i, one_piece(shard, i), arena.slot(i)) for i in (8, 9)], done)
    assert all(gate.entered.acquire(timeout=10) for _ in range(2))
    assert all(ticket.state is State.STARTED for ticket in demand)
    gate.opened.set()
    assert sorted(done.get(timeout=10).key for _ in range(10)) == list(range(10))
    reader.close()


def test_a_failure_travels_in_its_ticket_and_the_thread_lives_on(shard):
    calls = []

    def read(fd, buffer, offset):
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, buffer, offset)

    arena, done, reader = Arena(1, NBYTES), SimpleQueue(), ExpertReader(1, read=read)
    results = []
    for i in range(3):
        reader.submit(i, one_piece(shard, i), arena.slot(0), done)
        results.append(done.get(timeout=10))
    assert [ticket.landed for ticket in results] == [True, False, True]
    with pytest.raises(StorageError, match=r"shard: .*offset \d+ failed after 0: Input/output error \(errno 5\)"):
        raise results[1].error
    assert (reader.counters.reads, reader.counters.failed) == (2, 1)
    reader.close()


def test_a_missing_file_and_a_small_buffer_are_errors_of_their_ticket(shard, tmp_path):
    arena, done, reader = Arena(1, NBYTES), SimpleQueue(), ExpertReader(2)
    reader.submit(0, ExpertSpan(tmp_path / "gone", ((0, NBYTES),)), arena.slot(0), done)
    assert "cannot be opened" in str(done.get(timeout=10).error)
    reader.submit(0, one_piece(shard, 0), arena.slot(0)[:4096], done)
    assert "does not fit a buffer of 4096" in str(done.get(timeout=10).error)
    reader.submit(0, ExpertSpan(shard, ((0, NBYTES), (NBYTES, 10 * NBYTES))), arena.slot(0), done)
    assert "an expert of 99011 bytes does not fit" in str(done.get(timeout=10).error)
    reader.submit(0, one_piece(shard, 0), arena.slot(0), done)
    assert done.get(timeout=10).landed
    reader.close()


def test_close_fails_what_waits_and_ends_the_threads(shard):
    gate, arena, done = Gate(), Arena(2, NBYTES), SimpleQueue()
    reader = ExpertReader(1, read=gate)
    started = reader.submit(0, one_piece(shard, 0), arena.slot(0), done)
    assert gate.entered.acquire(timeout=10)
    waiting = reader.submit(1, one_piece(shard, 1), arena.slot(1), done)
    threading.Timer(0.05, gate.opened.set).start()
    reader.close()
    reader.close()
    assert started.landed
    assert waiting.state is State.DONE
    assert "closed before this read started" in str(waiting.error)
    assert {done.get(timeout=10).key, done.get(timeout=10).key} == {0, 1}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("expert-reader")]
    with pytest.raises(RuntimeError, match="closed"):
        reader.submit(0, one_piece(shard, 0), arena.slot(0), done)
    with pytest.raises(ValueError, match="at least 1"):
        ExpertReader(0)
    with pytest.raises(ValueError, match="at least 1"):
        ExpertReader(1, background=0)


def test_no_room_for_threads_is_a_sentence_and_leaves_none(shard, monkeypatch):
    before, start = threading.active_count(), threading.Thread.start

    def failing(thread):
        if thread.name == "expert-reader-3":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing)
    with pytest.raises(StorageError, match="expected 8 threads for reading experts, found room for 3"):
        ExpertReader(8, files=[shard])
    assert threading.active_count() == before
    reader, done = ExpertReader(8), SimpleQueue()
    with pytest.raises(StorageError, match="found room for 3"):
        reader.submit(0, one_piece(shard, 0), Arena(1, NBYTES).slot(0), done)
    assert threading.active_count() == before
    monkeypatch.undo()
    assert reader.submit(0, one_piece(shard, 0), Arena(1, NBYTES).slot(0), done) is done.get(timeout=10)
    reader.close()
