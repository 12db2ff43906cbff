import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import direct_io
from storage.direct_io import (
    ALIGNMENT,
    FileTable,
    OpenFile,
    aligned_buffer,
    aligned_window,
    pread,
    pread_full,
    probe_direct,
)
from storage.errors import StorageError


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "shard.safetensors"
    path.write_bytes(os.urandom(5 * ALIGNMENT + 123))
    return path


@given(offset=st.integers(0, 1 << 40), nbytes=st.integers(1, 1 << 25))
def test_window_covers_the_range_with_less_than_a_page_on_each_side(offset, nbytes):
    start, length = aligned_window(offset, nbytes)
    assert start % ALIGNMENT == length % ALIGNMENT == 0
    assert offset - ALIGNMENT < start <= offset
    assert offset + nbytes <= start + length < offset + nbytes + ALIGNMENT


def test_window_of_a_released_expert():
    assert aligned_window(4096, 17_547_264)[1] == 4284 * ALIGNMENT
    assert aligned_window(4097, 17_547_264)[1] == 4285 * ALIGNMENT


@pytest.mark.parametrize("direct", [True, False])
def test_reads_equal_the_file_to_its_last_byte(shard, direct):
    data, table = shard.read_bytes(), FileTable(direct)
    file = table.acquire(shard)
    assert file.direct == (direct and not table.fallbacks)
    start, length = aligned_window(len(data) - 200, 200)
    buffer = aligned_buffer(length)
    got = pread_full(file, memoryview(buffer)[:length], start, len(data) - start)
    assert got == len(data) - start
    assert buffer[:got] == data[start:]
    table.release(shard)
    table.close()
    table.close()


@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_and_interrupts_are_repeated(shard, direct):
    data, calls = shard.read_bytes(), []

    def read(fd, buffer, offset):
        calls.append(offset)
        if len(calls) % 3 == 0:
            raise InterruptedError
        return min(pread(fd, buffer, offset), 5000)  # not a multiple of a block

    table = FileTable(direct)
    file = table.acquire(shard)
    buffer = aligned_buffer(len(data))
    assert pread_full(file, memoryview(buffer), 0, len(data), read) == len(data)
    assert buffer[: len(data)] == data
    assert len(calls) > 5
    assert not file.direct or all(offset % ALIGNMENT == 0 for offset in calls)
    table.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_truncated_file_is_named_with_offset_expected_and_got(shard, direct):
    file = FileTable(direct).acquire(shard)
    os.truncate(shard, 3 * ALIGNMENT + 7)
    buffer = aligned_buffer(4 * ALIGNMENT)
    with pytest.raises(StorageError, match=r"shard\.safetensors: file truncated: expected 16384 bytes at offset 4096"):
        pread_full(file, memoryview(buffer), ALIGNMENT, 4 * ALIGNMENT)
    with pytest.raises(StorageError, match="got 8199; the file ends at 12295, fetch it again"):
        pread_full(file, memoryview(buffer), ALIGNMENT, 4 * ALIGNMENT)
    os.close(file.fd)


def test_a_drive_error_is_named_with_offset_and_errno(shard):
    def read(fd, buffer, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = OpenFile(shard, -1, True)
    with pytest.raises(StorageError, match=r"shard.*reading 10 bytes at offset 4096 failed after 0: .*\(errno 5\)"):
        pread_full(file, memoryview(bytearray(10)), 4096, 10, read)


def test_a_read_that_never_progresses_ends(shard):
    file = FileTable().acquire(shard)
    with pytest.raises(StorageError, match="short reads: expected 8192 bytes at offset 0, got 100, 8 times"):
        pread_full(OpenFile(shard, file.fd, True), memoryview(bytearray(8192)), 0, 8192, lambda *_: 100)
    os.close(file.fd)


def test_fallback_is_reported_once_per_directory_with_its_reason(shard, monkeypatch):
    probed = []

    def refuse(path):
        probed.append(path)
        return "reading with O_DIRECT failed: Invalid argument"

    monkeypatch.setattr(direct_io, "probe_direct", refuse)
    other = shard.with_name("other.safetensors")
    other.write_bytes(b"x" * 10)
    table = FileTable()
    assert not table.acquire(shard).direct
    assert not table.acquire(other).direct
    assert table.fallbacks == {shard.parent.resolve(): "reading with O_DIRECT failed: Invalid argument"}
    assert len(probed) == 1
    table.close()


def test_a_refused_or_lying_direct_read_is_a_reason(shard, monkeypatch):
    def refuse(fd, buffer, offset):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(direct_io, "pread", refuse)
    reason = probe_direct(shard)
    assert reason is not None
    assert "Invalid argument" in reason
    monkeypatch.setattr(direct_io, "pread", lambda fd, buffer, offset: 512)
    reason = probe_direct(shard)
    assert reason is not None
    assert "512" in reason or "failed" in reason  # a file system that refuses the open says so first


def test_descriptors_are_limited_and_files_in_use_stay_open(tmp_path):
    paths = [tmp_path / f"{i}" for i in range(6)]
    for path in paths:
        path.write_bytes(b"x" * 100)
    table = FileTable(direct=False, limit=2)
    held = table.acquire(paths[0])
    for path in paths[1:]:
        table.acquire(path)
        table.release(path)
    assert pread(held.fd, memoryview(bytearray(100)), 0) == 100
    assert len(table._files) == 2
    table.close()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"gone: cannot be opened: No such file"):
        FileTable().acquire(tmp_path / "gone")
