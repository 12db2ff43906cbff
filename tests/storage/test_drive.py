import os
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import pytest

from storage import reader as reader_module
from storage.arena import Arena
from storage.direct_io import pread
from storage.drive import UNKNOWN_DEVICE, device_of, mount_point
from storage.read_queue import Priority, State
from storage.reader import ExpertReader
from storage.span import ExpertSpan

NBYTES = 5000


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """One file on each of two drives, numbered 1 and 2."""
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        path.write_bytes(os.urandom(20 * NBYTES))
    monkeypatch.setattr(reader_module, "device_of", lambda path: 1 + paths.index(path))
    monkeypatch.setattr(reader_module, "mount_point", lambda path: path.name)
    return paths


def spans(path, n):
    return [ExpertSpan(path, ((i * NBYTES, NBYTES),)) for i in range(n)]


class Stuck:
    """A read call that hangs on one file until it is released, and counts what hangs."""

    def __init__(self, path):
        self.inode, self.released, self.hanging = path.stat().st_ino, threading.Event(), threading.Semaphore(0)

    def __call__(self, fd, buffer, offset):
        if os.fstat(fd).st_ino == self.inode:
            self.hanging.release()
            assert self.released.wait(10)
        return pread(fd, buffer, offset)


def test_a_drive_that_hangs_does_not_hold_up_another(shards):
    stuck = Stuck(shards[0])
    reader, arena, done = ExpertReader(2, read=stuck), Arena(20, NBYTES), SimpleQueue()
    slow = [(i, span, arena.slot(i)) for i, span in enumerate(spans(shards[0], 5))]
    fast = [(10 + i, span, arena.slot(10 + i)) for i, span in enumerate(spans(shards[1], 5))]
    tickets = reader.submit_many([*slow, *fast], done)
    guess = reader.submit(19, spans(shards[1], 6)[5], arena.slot(19), done, Priority.SPECULATION)
    assert {done.get(timeout=10).key for _ in range(6)} == {10, 11, 12, 13, 14, 19}
    assert guess.landed
    assert sum(ticket.state is State.STARTED for ticket in tickets[:5]) <= 2
    assert reader.cancel(tickets[4])
    stuck.released.set()
    assert {done.get(timeout=10).key for _ in range(4)} == {0, 1, 2, 3}
    assert tickets[4].state is State.CANCELLED
    reader.close()


def test_each_drive_has_its_own_depth(shards):
    stuck = [Stuck(path) for path in shards]
    reader = ExpertReader(
        5, files=shards, depths={2: 3}, read=lambda fd, buffer, offset: stuck[fd_is_second(fd)](fd, buffer, offset)
    )

    def fd_is_second(fd):
        return int(os.fstat(fd).st_ino == stuck[1].inode)

    assert reader.n_threads == 8
    assert [(drive.name, drive.depth) for drive in reader.counters.drives] == [("first", 5), ("second", 3)]
    arena, done = Arena(20, NBYTES), SimpleQueue()
    for first, path in ((0, shards[0]), (10, shards[1])):
        reader.submit_many([(first + i, span, arena.slot(first + i)) for i, span in enumerate(spans(path, 10))], done)
    for one, depth in zip(stuck, (5, 3), strict=True):
        assert all(one.hanging.acquire(timeout=10) for _ in range(depth))
        assert not one.hanging.acquire(timeout=0.02)
    for one in stuck:
        one.released.set()
    assert {done.get(timeout=10).key for _ in range(20)} == set(range(20))
    reader.close()


def test_counters_tell_the_drives_apart_and_count_only_busy_time(shards):
    def read(fd, buffer, offset):
        time.sleep(0.01)
        return pread(fd, buffer, offset)

    reader, arena, done = ExpertReader(2, direct=False, read=read), Arena(20, NBYTES), SimpleQueue()
    started = time.perf_counter()
    reader.submit_many([(i, span, arena.slot(i)) for i, span in enumerate(spans(shards[0], 4))], done)
    for _ in range(4):
        done.get(timeout=10)
    wall_s = time.perf_counter() - started
    reader.submit(9, ExpertSpan(shards[1], ((20 * NBYTES, 10),)), arena.slot(9), done)
    assert done.get(timeout=10).error is not None
    first, second = reader.counters.drives
    time.sleep(0.02)
    assert reader.counters.drives == (first, second)  # idle time is nobody's
    assert (first.name, first.reads, first.failed, first.nbytes) == ("first", 4, 0, 4 * NBYTES)
    assert (second.name, second.reads, second.failed, second.nbytes) == ("second", 0, 1, 0)
    assert 0.02 <= first.busy_s <= wall_s  # four reads of 10 ms, two at a time
    assert first.gb_s == 4 * NBYTES / first.busy_s / 1e9
    assert second.gb_s == 0.0
    assert (reader.counters.reads, reader.counters.failed, reader.counters.nbytes) == (4, 1, 4 * NBYTES)
    reader.close()


def test_a_read_in_flight_counts_as_busy(shards):
    stuck = Stuck(shards[0])
    reader, done = ExpertReader(1, read=stuck), SimpleQueue()
    reader.submit(0, spans(shards[0], 1)[0], Arena(1, NBYTES).slot(0), done)
    assert stuck.hanging.acquire(timeout=10)
    time.sleep(0.01)
    assert reader.counters.drives[0].busy_s >= 0.01
    stuck.released.set()
    done.get(timeout=10)
    reader.close()


def test_a_file_lies_where_its_link_points(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"x")
    link.symlink_to("/proc/version")
    assert device_of(file) == tmp_path.stat().st_dev
    assert device_of(link) == Path("/proc/version").stat().st_dev
    assert mount_point(link) == "/proc"
    assert os.path.ismount(mount_point(file))
    assert device_of(tmp_path / "gone") == tmp_path.stat().st_dev
    assert mount_point(tmp_path / "gone") == mount_point(file)
    assert device_of(tmp_path / "no" / "where") == UNKNOWN_DEVICE
    assert mount_point(tmp_path / "no" / "where") == str(tmp_path / "no")
