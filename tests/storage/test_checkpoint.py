"""Tensors come back bit by bit, experts are found where they lie, and failures during a run name file and offset."""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.checkpoint import Checkpoint
from storage.errors import CheckpointError, StorageError
from streamer.config.load import load_model_config
from streamer.config.tensors import VISION_PREFIXES, expert_tensors, trunk_tensors
from tests.bad_checkpoints import shard
from tests.checkpoints import EXPERT_PARTS, Dims, random_tensor, shard_tables, write_checkpoint

EMBED = "language_model.model.embed_tokens.weight"
EXPERT = "language_model.model.layers.{}.block_sparse_moe.experts.{}.{}"
NUMPY = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}


def open_checkpoint(*directories: Path) -> Checkpoint:
    config = load_model_config(directories)
    return Checkpoint.open(directories, trunk_tensors(config), expert_tensors(config), VISION_PREFIXES)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    write_checkpoint(tmp_path)
    with open_checkpoint(tmp_path) as opened:
        yield opened


def test_every_tensor_is_what_was_written(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=7, vision=True)
    dims = Dims(vision=True)
    with open_checkpoint(tmp_path) as checkpoint:
        for table in shard_tables(dims).values():
            for name, (dtype, shape) in table.items():
                found = checkpoint.read(name)
                assert (found.dtype, found.shape) == (NUMPY[dtype], shape)
                assert found.tobytes() == random_tensor(dims, 7, name, dtype, shape), name


def test_expert_is_one_piece_in_canonical_order(checkpoint: Checkpoint) -> None:
    for layer in range(1, 6):
        for expert in range(8):
            span = checkpoint.expert_span(layer, expert)
            assert len(span.pieces) == 1
            assert span.nbytes == checkpoint.expert_bytes == 3 * 32 * (16 + 1)
            assert span.path.read_bytes()[span.offset : span.offset + span.nbytes] == parts(checkpoint, layer, expert)


def test_scattered_expert_is_six_pieces_in_the_same_order(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, contiguous=False)
    with open_checkpoint(tmp_path) as checkpoint:
        span = checkpoint.expert_span(3, 5)
        assert len(span.pieces) == 6
        raw = span.path.read_bytes()
        content = b"".join(raw[offset : offset + nbytes] for offset, nbytes in span.pieces)
        assert content == parts(checkpoint, 3, 5)
        assert span.nbytes == checkpoint.expert_bytes


def parts(checkpoint: Checkpoint, layer: int, expert: int) -> bytes:
    return b"".join(checkpoint.read(EXPERT.format(layer, expert, part)).tobytes() for part in EXPERT_PARTS)


@pytest.mark.parametrize(("layer", "expert"), [(0, 0), (6, 0), (1, 8), (1, -1)])
def test_no_such_expert(checkpoint: Checkpoint, layer: int, expert: int) -> None:
    with pytest.raises(StorageError, match="experts 0-7 in layers 1-5"):
        checkpoint.expert_span(layer, expert)


def test_unknown_tensor(checkpoint: Checkpoint) -> None:
    for name in ("nothing", EXPERT.format(9, 0, EXPERT_PARTS[0]), EXPERT.format(1, 8, EXPERT_PARTS[0])):
        with pytest.raises(StorageError, match="no tensor"):
            checkpoint.read(name)


@pytest.mark.parametrize("rows", [[], [0], [299], [5, 4, 3], [7, 7, 8, 9, 250, 7], range(300)])
def test_rows(checkpoint: Checkpoint, rows: Sequence[int]) -> None:
    found = checkpoint.read_rows(EMBED, np.array(rows, dtype=np.int64))
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, checkpoint.read(EMBED)[list(rows)])


@pytest.mark.parametrize("rows", [[-1], [300], [[0]]])
def test_rows_out_of_range(checkpoint: Checkpoint, rows: list[Any]) -> None:
    with pytest.raises(StorageError, match="rows must be"):
        checkpoint.read_rows(EMBED, np.array(rows))


def test_rows_read_only_what_was_asked(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = os.preadv

    def spy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(len(buffer) for buffer in buffers))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", spy)
    checkpoint.read_rows(EMBED, np.array([10, 200, 11, 10]))
    assert sorted(sizes) == [128, 256]  # 64 wide, two bytes each; rows 10 and 11 are one read


def test_short_reads_are_continued(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checkpoint.read(EMBED)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:1000]], offset))
    np.testing.assert_array_equal(checkpoint.read(EMBED), whole)


def test_file_truncated_during_the_run(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        path = shard(tmp_path, 7)
        os.truncate(path, path.stat().st_size - 10)
        name = "language_model.model.output_attn_res_proj.weight"
        with pytest.raises(StorageError, match="expected 128 bytes, got 118") as caught:
            checkpoint.read(name)
        assert str(path) in str(caught.value)


def test_failing_drive_names_file_and_offset(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        StorageError, match=r"model-00007.*read of .*embed_tokens.* at byte [0-9,]+: Input/output error"
    ):
        checkpoint.read(EMBED)


def test_bad_checkpoint_is_refused_at_opening(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    shard(tmp_path, 2).unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert len(caught.value.problems) == 1


def test_fingerprint_follows_the_content_not_the_place(tmp_path: Path) -> None:
    for name, overrides in {"a": {}, "b": {}, "c": {"contiguous": False}, "d": {"experts": 9}}.items():
        write_checkpoint(tmp_path / name, **overrides)
    marks = [open_checkpoint(tmp_path / name).fingerprint for name in "abcd"]
    assert marks[0] == marks[1]
    assert len(set(marks)) == 3


def n_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_are_lazy_and_closed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    before = n_open()
    checkpoint = open_checkpoint(tmp_path)
    assert n_open() == before
    checkpoint.read(EMBED)
    assert n_open() == before + 1
    checkpoint.close()
    checkpoint.close()
    assert n_open() == before
    checkpoint.read(EMBED)  # opens again
    checkpoint.close()


def test_threads_share_a_checkpoint(checkpoint: Checkpoint) -> None:
    whole = checkpoint.read(EMBED)
    checkpoint.close()
    results: list[bool] = []

    def work() -> None:
        results.append(all(np.array_equal(checkpoint.read(EMBED), whole) for _ in range(20)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_read_only_directory_with_odd_name(tmp_path: Path) -> None:
    directory = tmp_path / "Kimi K3 模型 [1]"
    write_checkpoint(directory)
    for path in [*directory.iterdir(), directory]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        listing = sorted(directory.iterdir())
        assert open_checkpoint(directory).read(EMBED).shape == (300, 64)
        assert sorted(directory.iterdir()) == listing
    finally:
        directory.chmod(0o755)
