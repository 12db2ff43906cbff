"""A pack is what was made, whole or absent: built in one go, after a kill, on a full drive, by two at once."""

import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from storage.direct_io import ALIGNMENT
from storage.errors import StorageError
from storage.trunk_pack import PackLayout, PackMatrix, TrunkPack
from storage.trunk_pack_builder import build_pack

MATRICES = [PackMatrix("a", 40, 300), PackMatrix("b", 7, 4096), PackMatrix("c", 900, 33)]
LAYOUT = PackLayout("f00d", "int8", MATRICES)


def rows_of(matrix: PackMatrix) -> np.ndarray:
    dice = np.random.default_rng(len(matrix.name) + matrix.rows)
    return dice.integers(0, 256, (matrix.rows, matrix.row_bytes), dtype=np.uint8)


def scales_of(matrix: PackMatrix) -> np.ndarray:
    return np.arange(matrix.rows, dtype=np.float32) + matrix.row_bytes


def produce(missing: Sequence[PackMatrix]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for matrix in missing:
        for first in range(0, matrix.rows, 16):
            yield rows_of(matrix)[first : first + 16], scales_of(matrix)[first : first + 16]


def check(path: Path) -> None:
    pack = TrunkPack(path, LAYOUT)
    data = path.read_bytes()
    for matrix in MATRICES:
        block = pack.block(matrix.name)
        assert block.offset % ALIGNMENT == 0
        rows = np.frombuffer(data, np.uint8, block.nbytes, block.offset).reshape(matrix.rows, matrix.row_bytes)
        np.testing.assert_array_equal(rows, rows_of(matrix))
        np.testing.assert_array_equal(pack.scales(matrix.name), scales_of(matrix))
        pack.check(matrix.name, rows)


def test_it_is_a_safetensors_file_with_what_was_made(tmp_path: Path) -> None:
    path, seen = tmp_path / "cache" / "pack", []
    build_pack(path, LAYOUT, produce, lambda done, total: seen.append((done, total)))
    check(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["pack"]
    total = sum(matrix.nbytes for matrix in MATRICES)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    assert header.pop("__metadata__")["fingerprint"] == "f00d"
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert ends[0][0] == 0
    assert all(last[1] == following[0] for last, following in pairwise(ends))  # no holes
    assert ends[-1][1] == len(data) - 8 - struct.unpack("<Q", data[:8])[0]
    assert header["c.rows"]["shape"] == [900, 33]


def test_a_build_that_failed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path, asked = tmp_path / "pack", []

    def fails_in_c(missing: Sequence[PackMatrix]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for rows, scales in produce(missing):
            if rows.shape[1] == 33:
                raise StorageError("the drive is gone")
            yield rows, scales

    with pytest.raises(StorageError, match="the drive is gone"):
        build_pack(path, LAYOUT, fails_in_c, sync_bytes=1)
    assert not path.exists()

    def goes_on(missing: Sequence[PackMatrix]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        asked.extend(matrix.name for matrix in missing)
        return produce(missing)

    build_pack(path, LAYOUT, goes_on)
    assert asked == ["c"]
    check(path)


def test_what_a_kill_left_is_summed_again_and_made_again_where_it_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    code = f"""
import time
from pathlib import Path
from tests.storage.test_trunk_pack import LAYOUT, build_pack, produce
def slow(missing):
    for made in produce(missing):
        yield made
        time.sleep(0.02)
build_pack(Path({str(path)!r}), LAYOUT, slow, sync_bytes=1)
"""
    for wait_s in (0.05, 0.15, 0.3):
        child = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
        deadline = time.monotonic() + 20
        while not path.with_suffix(".partial").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(wait_s)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert not path.exists()
    with path.with_suffix(".partial").open("r+b") as file:  # a torn write under a sum that says otherwise
        file.seek(LAYOUT.rows_at(0) + 5)
        file.write(b"\x00\x01\x02")
    build_pack(path, LAYOUT, produce)
    check(path)


def test_a_second_builder_is_told_to_wait(tmp_path: Path) -> None:
    path = tmp_path / "pack"

    def during(missing: Sequence[PackMatrix]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with pytest.raises(StorageError, match="is being written by another process"):
            build_pack(path, LAYOUT, produce)
        return produce(missing)

    build_pack(path, LAYOUT, during)
    check(path)


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (LAYOUT.rows_at(1) + 9, "rows of b have the CRC-32"),
        (LAYOUT.scales_at(2) + 1, "scales of c have the CRC-32"),
        (20, "is not the pack that is needed"),
    ],
)
def test_a_flipped_byte_is_found(tmp_path: Path, at: int, words: str) -> None:
    path = tmp_path / "pack"
    build_pack(path, LAYOUT, produce)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(StorageError, match=words) as found:
        check_rows(TrunkPack(path, LAYOUT), bytes(data))
    assert "Delete it" in str(found.value)


def check_rows(pack: TrunkPack, data: bytes) -> None:
    for matrix in MATRICES:
        block = pack.block(matrix.name)
        pack.check(matrix.name, np.frombuffer(data, np.uint8, block.nbytes, block.offset))


def test_another_checkpoint_s_or_a_cut_pack_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    build_pack(path, LAYOUT, produce)
    with pytest.raises(StorageError, match="expected fingerprint beef, found f00d"):
        TrunkPack(path, PackLayout("beef", "int8", MATRICES))
    with pytest.raises(StorageError, match="expected format int4, found int8"):
        TrunkPack(path, PackLayout("f00d", "int4", MATRICES))
    os.truncate(path, LAYOUT.nbytes - 1)
    with pytest.raises(StorageError, match=rf"expected {LAYOUT.nbytes:,} bytes, found {LAYOUT.nbytes - 1:,}"):
        TrunkPack(path, LAYOUT)
    path.write_bytes(b"")
    with pytest.raises(StorageError, match="is not the pack that is needed"):
        TrunkPack(path, LAYOUT)


def test_no_room_and_no_permission_are_sentences(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LAYOUT.nbytes // 2, limit[1]))
        with pytest.raises(StorageError, match="make room and start again"):
            build_pack(path, LAYOUT, produce)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, previous)
    assert not path.exists()
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(StorageError, match="Expected a directory that this user may write to"):
        build_pack(blocked / "pack", LAYOUT, produce)
    build_pack(path, LAYOUT, produce)
    check(path)
