"""Promise 1: the same bits whatever the memory, the chunks, the threads, the neighbours and the order of reads."""

import random
import time
from pathlib import Path

import numba
import numpy as np
import pytest

from storage.direct_io import pread
from streamer.engine.engine import Cancelled
from streamer.model.batch import StepBatch
from tests.integration.runs import Run, same_bits

IDS = np.random.default_rng(11).integers(0, 299, 70).tolist()


@pytest.fixture(scope="module")
def resident(checkpoint: Path):
    with Run(checkpoint) as run:
        yield run


@pytest.fixture(scope="module")
def expected(resident: Run) -> np.ndarray:
    """Token by token, everything resident."""
    return resident.logits(IDS, [1])


@pytest.mark.parametrize("slots", [2, 4, 8], ids=["top-k", "half", "all"])
def test_slots(checkpoint: Path, expected: np.ndarray, slots: int) -> None:
    with Run(checkpoint, slots) as run:
        assert same_bits(run.logits(IDS, [16]), expected)
        counters = run.source.counters
        assert (counters.decode_misses > 0) == (slots < 8)
        assert counters.bytes_read > 0


def test_one_slot_streams_in_waves(checkpoint: Path, expected: np.ndarray) -> None:
    """Below top-k nothing is dropped: the minimum that the cache accepts."""
    with Run(checkpoint, 1) as run:
        assert same_bits(run.logits(IDS, [64]), expected)


@pytest.mark.parametrize("chunks", [[1], [3], [64], [70], [1, 8, 9, 2]], ids=str)
def test_prefill_chunks(resident: Run, expected: np.ndarray, chunks: list[int]) -> None:
    """8 is the longest journalled step and 9 the shortest chunk, so both ways and their seams are here."""
    assert same_bits(resident.logits(IDS, chunks), expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(resident: Run, expected: np.ndarray, threads: int) -> None:
    before = numba.get_num_threads()
    if threads > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("one core")
    numba.set_num_threads(threads)
    try:
        assert same_bits(resident.logits(IDS, [16]), expected)
    finally:
        numba.set_num_threads(before)


def test_batch_neighbours(resident: Run, expected: np.ndarray) -> None:
    """Decode rows of one sequence beside a prefill chunk and a decode step of two others, in every order."""
    others = [np.random.default_rng(seed).integers(0, 299, 70).tolist() for seed in (5, 6)]
    states = [resident.state() for _ in range(3)]
    rows = []
    for at in range(0, 30):
        parts = [(states[0], [IDS[at]]), (states[1], others[0][2 * at : 2 * at + 2]), (states[2], [others[1][at]])]
        order = [(0, 1, 2), (2, 0, 1), (1, 2, 0)][at % 3]
        logits = resident.model.forward(StepBatch.of([parts[i] for i in order]))
        rows.append(logits[order.index(0)])
        for state, ids in parts:
            state.commit(len(ids))
    assert same_bits(np.stack(rows), expected[:30])


def test_random_read_delays(checkpoint: Path, expected: np.ndarray) -> None:
    dice = random.Random(2)

    def slow(fd: int, buffer: memoryview, offset: int) -> int:
        time.sleep(dice.random() * 0.002)
        return pread(fd, buffer, offset)

    with Run(checkpoint, 3, read=slow) as run:
        assert same_bits(run.logits(IDS, [9]), expected)


@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("length", [1, 20], ids=["decode", "chunk"])
def test_cancelled_step_leaves_no_trace(resident: Run, expected: np.ndarray, layer: int, length: int) -> None:
    """A step stopped before any layer and rolled back: what follows is as if it had never run."""
    state = resident.state()
    parts = [resident.model.forward(StepBatch.of([(state, IDS[:10])], all_logits=True))]
    state.commit(10)

    def stop(at: int) -> None:
        if at == layer:
            raise Cancelled

    with pytest.raises(Cancelled):
        resident.model.forward(StepBatch.of([(state, IDS[40 : 40 + length])]), stop)
    state.rollback()
    for at in range(10, 30):
        parts.append(resident.model.forward(StepBatch.of([(state, [IDS[at]])])))
        state.commit(1)
    assert same_bits(np.concatenate(parts), expected[:30])


def test_finished_step_can_be_dropped(resident: Run, expected: np.ndarray) -> None:
    """Rollback after the last layer too: what verification of drafts will rely on."""
    state = resident.state()
    for ids in (IDS[:12], IDS[30:34], IDS[50:65]):
        keep = ids == IDS[:12]
        resident.model.forward(StepBatch.of([(state, ids)]))
        if keep:
            state.commit(len(ids))
        else:
            state.rollback()
    logits = resident.model.forward(StepBatch.of([(state, IDS[12:20])], all_logits=True))
    assert same_bits(logits, expected[12:20])


@pytest.mark.parametrize("accepted", range(6))
def test_part_of_a_drafted_step_can_be_committed(resident: Run, expected: np.ndarray, accepted: int) -> None:
    """Five tokens in one step, of which the first few are right: as if only those had ever been computed."""
    state = resident.state()
    resident.model.forward(StepBatch.of([(state, IDS[:12])]))
    state.commit(12)
    drafted = [*IDS[12 : 12 + accepted], *[7] * (5 - accepted)]
    logits = resident.model.forward(StepBatch.of([(state, drafted)], all_logits=True))
    assert same_bits(logits[:accepted], expected[12 : 12 + accepted])
    state.commit(accepted)
    at = 12 + accepted
    for first, stop in ((at, at + 1), (at + 1, at + 4), (at + 4, at + 20)):
        logits = resident.model.forward(StepBatch.of([(state, IDS[first:stop])], all_logits=True))
        state.commit(stop - first)
        assert same_bits(logits, expected[first:stop])
