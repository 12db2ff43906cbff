import errno
import fcntl
import os

import pytest

from storage import direct_io, probe
from storage.direct_io import ALIGNMENT, pread
from storage.probe import DEFAULT_DEPTH, DEPTHS, bytes_within, choose_depth, probe_drives

PAYLOAD = 20_000
WINDOW = 5 * ALIGNMENT


def has_direct(path):
    return direct_io.probe_direct(path) is None


@pytest.fixture
def shards(tmp_path):
    paths = [tmp_path / f"model-{i:05d}-of-000002.safetensors" for i in (1, 2)]
    for path in paths:
        path.write_bytes(os.urandom(40 * WINDOW + 123))
    if not has_direct(paths[0]):
        pytest.skip("no O_DIRECT here")
    return paths


def test_smallest_depth_within_three_percent_of_the_best():
    assert choose_depth({1: 1.0, 2: 1.96, 4: 2.0, 8: 1.99, 16: 2.01}) == 2
    assert choose_depth({1: 1.6, 2: 1.9, 4: 1.95, 8: 2.0, 16: 2.0}) == 4
    assert choose_depth({1: 1.0, 2: 2.0, 4: 4.0, 8: 6.0, 16: 7.0}) == 16
    assert choose_depth({1: 3.0, 2: 2.0, 4: 1.0, 8: 1.0, 16: 1.0}) == 1
    assert choose_depth({1: 0.5, 2: 0.5, 4: 0.5, 8: 0.5, 16: 0.5}) == 1
    assert choose_depth({}) == DEFAULT_DEPTH


def test_bytes_at_the_edges_count_in_proportion():
    # 3 to 5 s of [4, 10] is half a read; 9 to 13 s a quarter; one inside whole; one outside nothing
    assert bytes_within([(3, 5), (9, 13), (5, 9), (10, 12)], 1000, 4.0, 10.0) == 500 + 250 + 1000
    # a steady drive: two in flight, each read 2 s, so one read a second whatever the window
    reads = [(start + shift, start + shift + 2) for start in range(0, 40, 2) for shift in (0, 0.7)]
    assert bytes_within(reads, 1000, 11.3, 17.9) == pytest.approx(6600)


def test_reads_are_direct_aligned_whole_and_spread_over_the_files(shards):
    seen = []

    def read(fd, buffer, offset):
        seen.append((os.fstat(fd).st_ino, offset, len(buffer), fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return pread(fd, buffer, offset)

    found = probe_drives(shards, PAYLOAD, seconds=0.1, read=read)
    assert list(found) == [shards[0].stat().st_dev]
    (drive,) = found.values()
    assert drive.notes == ()
    assert os.path.ismount(drive.name)
    assert drive.window_bytes == WINDOW
    assert tuple(drive.gb_s) == DEPTHS
    assert all(rate > 0 for rate in drive.gb_s.values())
    assert drive.depth == choose_depth(drive.gb_s)
    assert all(direct and offset % WINDOW == 0 and nbytes == WINDOW for _, offset, nbytes, direct in seen)
    assert all(offset + nbytes <= 40 * WINDOW for _, offset, nbytes, _ in seen)
    first_round = {(inode, offset) for inode, offset, _, _ in seen[:80]}
    assert len(first_round) > 60  # random order; up to 16 are under way when the round ends
    assert {inode for inode, _ in first_round} == {path.stat().st_ino for path in shards}


def test_holes_are_flagged_and_never_read(shards):
    with shards[1].open("r+b") as file:
        file.truncate(10 * WINDOW)
        file.truncate(40 * WINDOW)
    inode, seen = shards[1].stat().st_ino, set()

    def read(fd, buffer, offset):
        if os.fstat(fd).st_ino == inode:
            seen.add(offset)
        return pread(fd, buffer, offset)

    (drive,) = probe_drives(shards, PAYLOAD, seconds=0.1, read=read).values()
    assert drive.notes[0].startswith("shard 2 of 2 on ")
    assert "have holes" in drive.notes[0]
    assert seen
    assert max(seen) + WINDOW <= 10 * WINDOW


def test_without_direct_reads_nothing_is_measured(shards, monkeypatch):
    def read(fd, buffer, offset):
        raise AssertionError("read through the page cache")

    monkeypatch.setattr(direct_io, "probe_direct", lambda path: "reading with O_DIRECT failed: Invalid argument")
    (drive,) = probe_drives(shards, PAYLOAD, read=read).values()
    assert (drive.gb_s, drive.depth) == ({}, DEFAULT_DEPTH)
    assert drive.notes[0] == f"{shards[0].parent} is not measured: reading with O_DIRECT failed: Invalid argument"
    assert f"no {WINDOW:,} bytes in one file that can be read with O_DIRECT" in drive.notes[1]


def test_what_goes_wrong_is_a_note(shards, tmp_path):
    def read(fd, buffer, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (drive,) = probe_drives(shards, PAYLOAD, read=read).values()
    assert (drive.gb_s, drive.depth) == ({}, DEFAULT_DEPTH)
    assert "could not be measured" in drive.notes[0]
    assert "Input/output error (errno 5)" in drive.notes[0]
    (drive,) = probe_drives([tmp_path / "gone"], PAYLOAD).values()
    assert "gone: cannot be opened: No such file" in drive.notes[0]
    (drive,) = probe_drives(shards, 50 * WINDOW).values()
    assert "no 1,024,000 bytes in one file" in drive.notes[0]


def test_each_drive_is_measured_on_its_own_files(shards, monkeypatch):
    monkeypatch.setattr(probe, "device_of", lambda path: 1 + shards.index(path))
    monkeypatch.setattr(probe, "mount_point", lambda path: path.name)
    inodes = {path.stat().st_ino: path.name for path in shards}
    seen = []

    def read(fd, buffer, offset):
        seen.append(inodes[os.fstat(fd).st_ino])
        return pread(fd, buffer, offset)

    found = probe_drives(shards, PAYLOAD, seconds=0.05, read=read)
    assert {device: drive.name for device, drive in found.items()} == {1: shards[0].name, 2: shards[1].name}
    assert seen == sorted(seen)  # one after the other
    assert set(seen) == {path.name for path in shards}
