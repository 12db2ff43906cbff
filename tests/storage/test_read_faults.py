"""One fault, one failed request: it says file, offset, expected and got; every other request has the file's bytes."""

import errno
import fcntl
import os
from queue import SimpleQueue

import pytest

from storage import direct_io
from storage.arena import Arena
from storage.direct_io import ALIGNMENT, FileTable, pread
from storage.reader import ExpertReader
from storage.span import ExpertSpan

NBYTES = 3 * ALIGNMENT + 5
COUNT = 12


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(7 + COUNT * NBYTES))
    return path


def spans(path):
    return [ExpertSpan(path, ((7 + i * NBYTES, NBYTES),)) for i in range(COUNT)]


def read_all(reader, wanted, content):
    """Read every span; check the bytes of those that landed; return key → error."""
    arena, done = Arena(len(wanted), NBYTES), SimpleQueue()
    reader.submit_many([(key, span, arena.slot(key)) for key, span in enumerate(wanted)], done)
    errors = {}
    for _ in wanted:
        ticket = done.get(timeout=10)
        (offset, nbytes), key = ticket.span.pieces[0], ticket.key
        if ticket.landed:
            assert arena.slot_view(key, ticket.skip, nbytes).tobytes() == content[offset : offset + nbytes]
        else:
            errors[key] = str(ticket.error)
    return errors


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV, errno.ETIMEDOUT])
def test_a_drive_error_hits_the_request_that_met_it(shard, direct, code):
    bad = 7 + 4 * NBYTES + 2 * ALIGNMENT  # no window of a neighbour reaches so far

    def read(fd, buffer, offset):
        if offset <= bad < offset + len(buffer):
            raise OSError(code, os.strerror(code))
        return pread(fd, buffer, offset)

    reader = ExpertReader(3, direct, read)
    errors = read_all(reader, spans(shard), shard.read_bytes())
    assert list(errors) == [4]
    assert str(shard) in errors[4]
    assert f"{os.strerror(code)} (errno {code})" in errors[4]
    reader.close()


@pytest.mark.parametrize("direct", [True, False])
def test_interrupts_and_short_reads_go_unnoticed(shard, direct):
    calls = []

    def read(fd, buffer, offset):
        calls.append(offset)
        if len(calls) % 3 == 0:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        return min(pread(fd, buffer, offset), 5000)

    reader = ExpertReader(3, direct, read)
    assert read_all(reader, spans(shard), shard.read_bytes()) == {}
    reader.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_cut_during_the_run_fails_what_lies_behind_the_cut(shard, direct):
    content, reader = shard.read_bytes(), ExpertReader(3, direct)
    assert read_all(reader, spans(shard), content) == {}
    end = 7 + 8 * NBYTES + 50
    os.truncate(shard, end)
    errors = read_all(reader, spans(shard), content)
    assert sorted(errors) == [8, 9, 10, 11]
    start = 7 + 8 * NBYTES - (7 + 8 * NBYTES) % ALIGNMENT if reader_is_direct(reader, direct) else 7 + 8 * NBYTES
    need = 7 + 9 * NBYTES - start
    assert f"expected {need} bytes at offset {start}, got {end - start}; the file ends at {end}" in errors[8]
    assert all(f"{shard}: file truncated" in error for error in errors.values())
    shard.write_bytes(content)  # fetched again, in place
    assert read_all(reader, spans(shard), content) == {}
    reader.close()


def reader_is_direct(reader, direct):
    return direct and not reader.fallbacks


def test_a_file_that_vanishes_is_read_to_its_end_where_it_was_open(shard, tmp_path):
    other = tmp_path / "other"
    content = shard.read_bytes()
    other.write_bytes(content)
    reader = ExpertReader(3)
    assert read_all(reader, spans(shard), content) == {}
    shard.unlink()
    other.unlink()
    errors = read_all(reader, [*spans(shard)[:6], *spans(other)[:6]], content)
    assert sorted(errors) == [6, 7, 8, 9, 10, 11]
    assert all(f"{other}: cannot be opened: No such file or directory" in error for error in errors.values())
    other.write_bytes(content)
    assert read_all(reader, spans(other), content) == {}
    reader.close()


@pytest.fixture
def refusal(shard, monkeypatch):
    """A switch: from `refuse()` on, neither read nor probe works with O_DIRECT."""
    if (reason := direct_io.probe_direct(shard)) is not None:
        pytest.skip(reason)

    class Refusal:
        refused = False

        def read(self, fd, buffer, offset):
            if self.refused and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return pread(fd, buffer, offset)

        def refuse(self):
            self.refused = True
            monkeypatch.setattr(direct_io, "probe_direct", lambda path: "refused now")

    return Refusal()


def test_direct_reads_refused_after_having_worked_fail_once_and_go_on_buffered(shard, refusal):
    content, reader = shard.read_bytes(), ExpertReader(1, read=refusal.read)
    assert read_all(reader, spans(shard), content) == {}
    refusal.refuse()
    errors = read_all(reader, spans(shard), content)
    assert list(errors) == [0]
    assert f"{shard}: O_DIRECT worked, and then reading {7 + NBYTES} bytes at offset 0 was refused" in errors[0]
    assert "Invalid argument (errno 22)" in errors[0]
    assert reader.fallbacks == {str(shard.parent.resolve()): "refused now"}
    assert read_all(reader, spans(shard), content) == {}
    reader.close()


def test_a_distrusted_file_stays_open_for_those_who_read_it(shard, refusal):
    table = FileTable()
    first = table.acquire(shard)
    table.distrust(shard)
    second = table.acquire(shard)
    assert second.fd != first.fd
    table.release(shard)
    os.fstat(first.fd)
    table.release(shard)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first.fd)
    os.fstat(second.fd)
    table.close()
