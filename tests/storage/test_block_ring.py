"""The ring: every byte in order whatever the sizes, one read at a time or many; what fails or is cut off hurts once."""

import errno
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from storage.arena import POISON
from storage.block_ring import BlockRing
from storage.blocks import Block, read_blocks
from storage.direct_io import aligned_buffer, pread
from storage.errors import StorageError
from storage.reader import ExpertReader

PAGE = 4096


@pytest.fixture
def blocks(tmp_path: Path) -> list[Block]:
    """Twelve blocks of all lengths at odd offsets; the last one ends with its file."""
    path = tmp_path / "shard"
    sizes = [1, PAGE, 5 * PAGE - 3, 7, 9 * PAGE, 2 * PAGE + 1, 3 * PAGE, 100, 6 * PAGE, 11 * PAGE - 1, 2, 4 * PAGE]
    path.write_bytes(os.urandom(1003 + sum(sizes)))
    starts = np.cumsum([1003, *sizes[:-1]]).tolist()
    return [Block(path, start, size) for start, size in zip(starts, sizes, strict=True)]


def content(block: Block) -> bytes:
    return block.path.read_bytes()[block.offset : block.offset + block.nbytes]


def least(blocks: list[Block]) -> int:
    return max(block.window_bytes for block in blocks)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("extra", [0, PAGE + 5, 100 * PAGE], ids=["one block", "odd", "more than all"])
def test_blocks_come_in_order_and_whole(blocks: list[Block], extra: int, direct: bool) -> None:
    dice = random.Random(4)

    def slow(fd: int, buffer: memoryview, offset: int) -> int:
        time.sleep(dice.random() * 0.001)
        return pread(fd, buffer, offset)

    reader = ExpertReader(3, direct, slow)
    ring = BlockRing(reader, blocks, least(blocks) + extra, piece_bytes=2 * PAGE, poison=True)
    for _ in range(3):
        for index, block in enumerate(blocks):
            with ring.take(index) as data:
                assert data.tobytes() == content(block)
    assert ring.counters.restarts == 0
    assert ring.counters.wait_s > 0
    ring.close()
    ring.close()
    assert sum(block.nbytes for block in blocks) * 3 <= ring.counters.bytes_read
    reader.close()


def test_reads_ahead_across_the_end_and_not_into_what_is_lent(blocks: list[Block]) -> None:
    """While a block is lent, what follows fills the ring and nothing touches the lent bytes."""
    reader = ExpertReader(2)
    ring = BlockRing(reader, blocks, 2 * least(blocks), poison=True)
    with ring.take(len(blocks) - 1) as data:
        before = reader.counters.reads
        deadline = time.monotonic() + 5
        while reader.counters.reads < before + 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert reader.counters.reads >= before + 2  # blocks 0 and 1, of the next round
        assert data.tobytes() == content(blocks[-1])
    assert (data == POISON).all() or data.tobytes() != content(blocks[-1])
    with ring.take(0) as data:
        assert data.tobytes() == content(blocks[0])
    assert ring.counters.restarts == 0
    ring.close()
    reader.close()


def test_any_other_block_starts_the_ring_again(blocks: list[Block]) -> None:
    reader = ExpertReader(2)
    ring = BlockRing(reader, blocks, 30 * PAGE, poison=True)
    dice = random.Random(7)
    jumps = at = 0
    for turn in range(200):
        if dice.random() < 0.3:
            target = dice.randrange(len(blocks))
            jumps += turn > 0 and target != at
            at = target
        with ring.take(at) as data:
            assert data.tobytes() == content(blocks[at])
        at = (at + 1) % len(blocks)
    assert ring.counters.restarts == jumps
    ring.close()
    reader.close()


def test_a_failed_read_is_its_own_step_s_error(blocks: list[Block]) -> None:
    """A drive error once in a while: the step that needs the block gets it, the next try works."""
    lock, calls = threading.Lock(), [0]

    def failing(fd: int, buffer: memoryview, offset: int) -> int:
        with lock:
            calls[0] += 1
            fails = calls[0] % 7 == 0
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, buffer, offset)

    reader = ExpertReader(3, read=failing)
    ring = BlockRing(reader, blocks, 40 * PAGE, piece_bytes=4 * PAGE, poison=True)
    failed = 0
    for _ in range(5):
        at = 0
        while at < len(blocks):
            try:
                with ring.take(at) as data:
                    assert data.tobytes() == content(blocks[at])
                at += 1
            except StorageError as error:
                assert "Input/output error" in str(error)  # noqa: PT017 - it may or may not come here
                failed += 1
    assert failed > 5
    ring.close()
    reader.close()


def test_an_error_while_a_block_is_lent_leaves_the_ring_usable(blocks: list[Block]) -> None:
    """Also where the frame that lent it lives on, as frames in tracebacks do."""
    reader = ExpertReader(2)
    ring = BlockRing(reader, blocks, 30 * PAGE)
    kept = ring.take(0)
    kept.__enter__()
    with ring.take(5) as data:
        assert data.tobytes() == content(blocks[5])
        kept.__exit__(None, None, None)
        assert data.tobytes() == content(blocks[5])
    with ring.take(6) as data:
        assert data.tobytes() == content(blocks[6])
    assert ring.counters.restarts == 1
    ring.close()
    reader.close()


def test_without_repeat_it_ends(blocks: list[Block]) -> None:
    reader = ExpertReader(2)
    ring = BlockRing(reader, blocks, sum(block.window_bytes for block in blocks) * 2, repeat=False)
    for index, block in enumerate(blocks):
        with ring.take(index) as data:
            assert data.tobytes() == content(block)
    assert reader.counters.reads == len(blocks)
    ring.close()
    reader.close()


def test_a_ring_that_is_too_small_says_what_it_needs(blocks: list[Block]) -> None:
    reader = ExpertReader(1)
    with pytest.raises(ValueError, match=f"at least {least(blocks)} bytes"):
        BlockRing(reader, blocks, least(blocks) - 1)
    reader.close()


def test_read_blocks_fills_every_window_or_says_which_failed(blocks: list[Block]) -> None:
    reader = ExpertReader(3)
    windows = [memoryview(aligned_buffer(block.window_bytes)) for block in blocks]
    landed: list[int] = []
    read_blocks(reader, zip(blocks, windows, strict=True), lambda index, _: landed.append(index), 2 * PAGE)
    for block, window in zip(blocks, windows, strict=True):
        assert bytes(window[block.lead_bytes : block.lead_bytes + block.nbytes]) == content(block)
    assert set(landed) == set(range(len(blocks)))
    beyond = Block(blocks[-1].path, blocks[-1].offset, blocks[-1].nbytes + 1)
    with pytest.raises(StorageError, match="file truncated"):
        read_blocks(reader, [(blocks[0], windows[0]), (beyond, memoryview(aligned_buffer(beyond.window_bytes)))])
    reader.close()
