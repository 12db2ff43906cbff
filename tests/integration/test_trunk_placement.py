"""Promise 1 for the trunk: pinned, streamed or both, in every format, the logits of one format are the same bits."""

import random
from pathlib import Path

import numpy as np
import pytest

from storage.direct_io import pread
from storage.errors import StorageError
from streamer.config.load import load_model_config
from streamer.experts.placement import FORMATS, TrunkPlacement, smallest_ring
from streamer.model.batch import StepBatch
from streamer.model.state import SequenceState
from tests.checkpoints import write_checkpoint
from tests.integration.runs import Run, same_bits

IDS = [5, 17, 3, 9, 200, 41, 7, 7, 12, 90, 33]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trunk")
    write_checkpoint(directory)
    return directory


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packs")


def streamed(directory: Path, trunk_format: str, pinned: tuple[int, ...] = (), routers: bool = False, more: int = 0):
    config = load_model_config([directory])
    ring = smallest_ring(config, trunk_format) + more
    return TrunkPlacement(trunk_format, frozenset(pinned), False, ring, routers)


@pytest.mark.parametrize("trunk_format", FORMATS)
def test_streamed_and_pinned_give_the_same_bits(directory: Path, cache: Path, trunk_format: str) -> None:
    config = load_model_config([directory])
    whole = TrunkPlacement.all_pinned(config, trunk_format)
    with Run(directory, placement=whole, cache_directory=cache) as run:
        expected = run.logits(IDS, [4, 1, 1, 1])
        assert run.trunk.counters.bytes_read == 0
    placements = [
        streamed(directory, trunk_format),
        streamed(directory, trunk_format, pinned=(1, 3), routers=True),
        streamed(directory, trunk_format, more=100_000),
    ]
    for placement in placements:
        with Run(directory, slots=3, placement=placement, cache_directory=cache) as run:
            assert same_bits(run.logits(IDS, [4, 1, 1, 1]), expected)
            assert run.trunk.counters.restarts == 0  # the order of reading is the order of use
            assert run.trunk.counters.bytes_read > 0
    if trunk_format != "bf16":
        with Run(directory) as run:
            assert not same_bits(run.logits(IDS, [4]), expected)


def test_a_cancelled_step_starts_the_ring_again(directory: Path, cache: Path) -> None:
    with Run(directory) as run:
        expected = run.logits(IDS, [4, 1])
    dice = random.Random(3)
    with Run(directory, placement=streamed(directory, "bf16"), cache_directory=cache) as run:
        state, got, at = run.state(), [], 0
        while at < len(IDS):
            part = IDS[at : at + dice.choice([1, 3])]
            stop_at = dice.choice([None, None, *range(run.config.n_layers)])

            def tick(layer: int, stop_at: int | None = stop_at) -> None:
                if layer == stop_at:
                    raise KeyboardInterrupt

            try:
                got.append(run.model.forward(StepBatch.of([(state, part)], all_logits=True), tick))
            except KeyboardInterrupt:
                state.rollback()
                continue
            state.commit(len(part))
            at += len(part)
        assert same_bits(np.concatenate(got), expected)
        assert run.trunk.counters.restarts > 0


def thrice(run: Run, state: SequenceState) -> None:
    """Run a step without keeping it: what is read ahead in one may fail in the next."""
    for _ in range(3):
        run.model.forward(StepBatch.of([(state, IDS[:4])], all_logits=True))
        state.rollback()


def test_a_failed_read_of_the_trunk_is_its_step_s_error_and_the_next_step_works(directory: Path) -> None:
    failing, calls = set(), [0]

    def read(fd: int, buffer: memoryview, offset: int) -> int:
        calls[0] += 1
        if calls[0] in failing:
            raise OSError(5, "Input/output error")
        return pread(fd, buffer, offset)

    with Run(directory) as run:
        expected = run.logits(IDS[:4], [4])
    with Run(directory, read=read, placement=streamed(directory, "bf16")) as run:
        for later in (1, 9, 23):
            failing.add(calls[0] + later)
            state = run.state()
            with pytest.raises(StorageError, match="Input/output error"):
                thrice(run, state)
            state.rollback()
            assert same_bits(run.model.forward(StepBatch.of([(state, IDS[:4])], all_logits=True)), expected)
