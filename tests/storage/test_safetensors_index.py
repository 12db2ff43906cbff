"""One header at a time: what is accepted, and what is said of everything else."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import StorageError
from storage.safetensors_index import read_header


def write(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def nested(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=6), values, max_size=4)


def entry(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_columns_are_parallel_and_metadata_is_not_a_tensor(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry(8, 24, "F32", [2, 2]), "a": entry(0, 8, "BF16", [4])}
    found = read_header(write(tmp_path / "a.safetensors", header, bytes(24)))
    assert found.names == ["b", "a"]
    assert found.kinds == [("F32", (2, 2)), ("BF16", (4,))]
    assert found.begin.tolist() == [8, 0]
    assert found.end.tolist() == [24, 8]
    assert found.expected_bytes == found.file_bytes == found.data_start + 24
    assert found.gap_bytes == 0


def test_gap_is_counted(tmp_path: Path) -> None:
    found = read_header(write(tmp_path / "a.safetensors", {"a": entry(0, 8), "b": entry(12, 16)}, bytes(16)))
    assert found.gap_bytes == 4


def test_scalar_and_empty_tensor(tmp_path: Path) -> None:
    header = {"scalar": entry(0, 4, "F32", []), "empty": entry(2, 2, "F32", [0, 5])}
    found = read_header(write(tmp_path / "a.safetensors", header, bytes(4)))
    assert found.kinds == [("F32", ()), ("F32", (0, 5))]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (entry(4, 0, shape=[4]), "0 <= begin <= end"),
        (entry(0, 4, shape=[5]), "needs 5 bytes"),
        (entry(0, 4, "U8", [-4]), "not a short list of sizes"),
        ({"dtype": "U8", "shape": [4]}, "data_offsets"),
        ({"dtype": "U8", "shape": [4], "data_offsets": [0]}, "malformed"),
        ({"dtype": "U8", "shape": [4], "data_offsets": [0.0, 4.0]}, "malformed"),
        ({"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}, "not a short list of sizes"),
        ({"dtype": ["U8"], "shape": [4], "data_offsets": [0, 4]}, "malformed"),
        ([0, 4], "malformed"),
        (None, "malformed"),
    ],
)
def test_malformed_entry_names_the_tensor(tmp_path: Path, bad: Any, said: str) -> None:
    path = write(tmp_path / "a.safetensors", {"fine": entry(0, 4), "odd": bad}, bytes(8))
    with pytest.raises(StorageError, match="'odd'") as caught:
        read_header(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), nested, max_leaves=8))
def test_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    for header in (value, {"a": value}, {"a": {"dtype": "U8", "shape": value, "data_offsets": [0, 0]}}):
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        refusal = ""
        try:
            read = read_header(path)
        except StorageError as error:
            refusal = str(error)
        if refusal:
            assert str(path) in refusal
        else:  # only empty tensors fit a file without data
            assert read.file_bytes == 8 + len(text)
            assert not np.any(read.end)


@given(st.binary(max_size=64))
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.safetensors"
    path.write_bytes(data)
    with pytest.raises(StorageError):
        read_header(path)


def test_no_permission_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.safetensors", {"a": entry(0, 4)}, bytes(4))

    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match="may not be read: Permission denied"):
        read_header(path)


def test_failing_drive_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.safetensors", {"a": entry(0, 4)}, bytes(4))

    def fail(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(StorageError, match="Input/output error while reading its header"):
        read_header(path)


def test_names_with_spaces_unicode_and_links_are_followed(tmp_path: Path) -> None:
    directory = tmp_path / "mödel dir (1)"
    directory.mkdir()
    write(tmp_path / "blob", {"层": entry(0, 4)}, bytes(4))
    (directory / "模型 a.safetensors").symlink_to(tmp_path / "blob")
    assert read_header(directory / "模型 a.safetensors").names == ["层"]
