"""Reads and checks the header of one safetensors file (k3-spec §2.2): u64 length, JSON, data.

Reads no weight. Says what a file is when it is not safetensors. Does not know which tensors a model should have.
"""

import json
import math
import os
import re
import stat
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import StorageError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
MAX_DIMENSIONS = 16
FETCH_AGAIN = "delete it and fetch it again"

Kind = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """One file's tensors as parallel sequences; transient, because `names` of an MoE shard are 5,400 strings.

    `kinds[i]` is (dtype, shape), shared between equal tensors; `begin`, `end` are int64 offsets from `data_start`.
    """

    path: Path
    file_bytes: int
    data_start: int
    digest: bytes
    names: list[str]
    kinds: list[Kind]
    begin: np.ndarray
    end: np.ndarray

    @property
    def expected_bytes(self) -> int:
        """File size that the header implies."""
        return self.data_start + (int(self.end.max()) if len(self.end) else 0)

    @property
    def gap_bytes(self) -> int:
        """Bytes of the data section that belong to no tensor."""
        return self.expected_bytes - self.data_start - int((self.end - self.begin).sum())


def read_header(path: Path) -> ShardHeader:
    """Return the checked header; raise StorageError saying what the file is instead. The file size is not compared.

    Compare `file_bytes` with `expected_bytes`: a download that stopped is a finding of its own.
    """
    descriptor = _open(path)
    try:
        file_bytes = os.fstat(descriptor).st_size
        data = _read_header_bytes(path, descriptor, file_bytes)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror} while reading its header") from error
    finally:
        os.close(descriptor)
    entries = _parse(path, data)
    entries.pop("__metadata__", None)
    names, kinds, begin, end = _columns(path, entries)
    digest = blake2b(data, digest_size=16).digest()
    header = ShardHeader(path, file_bytes, 8 + len(data), digest, names, kinds, begin, end)
    _check_overlap(header)
    return header


def _open(path: Path) -> int:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise StorageError(f"{path} is a directory; expected a safetensors file")
        if not stat.S_ISREG(mode):
            raise StorageError(f"{path} is not a regular file; expected a safetensors file")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise StorageError(
                f"{path} is a link to {path.readlink()}, which does not exist; fetch the file"
            ) from error
        raise StorageError(f"{path}: no such file; fetch it") from error
    except PermissionError as error:
        raise StorageError(f"{path} may not be read: {error.strerror}; give yourself read access") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error.strerror}") from error


def _read_header_bytes(path: Path, descriptor: int, file_bytes: int) -> bytes:
    if file_bytes == 0:
        raise StorageError(f"{path} is empty; {FETCH_AGAIN}")
    head = os.pread(descriptor, 512, 0)
    length = int.from_bytes(head[:8], "little")
    plausible = len(head) > 8 and 2 <= length <= MAX_HEADER_BYTES and head[8:9] == b"{"
    if not plausible:
        raise StorageError(f"{path} {_what_it_is(head, length)}")
    if 8 + length > file_bytes:
        raise StorageError(
            f"{path} looks like a partial download: its header needs {8 + length:,} bytes, "
            f"the file has {file_bytes:,}; resume the download"
        )
    data = bytearray()
    while len(data) < length:
        piece = os.pread(descriptor, length - len(data), 8 + len(data))
        if not piece:
            raise StorageError(f"{path} became shorter while its header was read: {8 + len(data):,} bytes")
        data += piece
    return bytes(data)


def _what_it_is(head: bytes, length: int) -> str:
    """Return a predicate for a file that does not begin like safetensors, and the cure."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith(b"version https://git-lfs"):
        size = re.search(rb"size (\d+)", head)
        real = f" (the file has {int(size[1]):,} bytes)" if size else ""
        return f"is a Git-LFS pointer, not the file itself{real}; run: git lfs pull"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return f"is an HTML page, not safetensors: the download met a login or error page; {FETCH_AGAIN}"
    if text.startswith(b"{"):
        return f"is JSON text, not safetensors: probably a server's error message; {FETCH_AGAIN}"
    if head.startswith(b"\x1f\x8b"):
        return "is gzip-compressed; unpack it: gzip -d"
    if head.startswith(b"PK\x03\x04") or head[:2] in {b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"}:
        return "is a pickle (PyTorch) file, not safetensors; expected the released safetensors shards"
    if head.startswith(b"GGUF"):
        return "is a GGUF file, not safetensors; expected the released safetensors shards"
    if not head.strip(b"\0"):
        return f"begins with zeros: space was reserved but the download did not write it; {FETCH_AGAIN}"
    if len(head) <= 8:
        return f"looks like a partial download: only {len(head)} bytes; resume the download"
    return f"is not safetensors: header length {length:,}, expected 2 to {MAX_HEADER_BYTES:,} then '{{'; {FETCH_AGAIN}"


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise StorageError(f"{path} has a damaged header: {error}; {FETCH_AGAIN}") from error
    if not isinstance(value, dict):
        raise StorageError(f"{path} has a header that is a JSON {type(value).__name__}, not an object; {FETCH_AGAIN}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice")
    return values


def _columns(path: Path, entries: dict[str, Any]) -> tuple[list[str], list[Kind], np.ndarray, np.ndarray]:
    """Turn the JSON entries into columns, checking each tensor's dtype, shape and span."""
    begin = np.empty(len(entries), np.int64)
    end = np.empty(len(entries), np.int64)
    kinds: list[Kind] = []
    shared: dict[Kind, tuple[Kind, int]] = {}
    for row, (name, entry) in enumerate(entries.items()):
        try:
            key = (entry["dtype"], tuple(entry["shape"]))
            first, last = entry["data_offsets"]
            kind, nbytes = shared.get(key) or shared.setdefault(key, _checked_kind(key))
            if type(first) is not int or type(last) is not int or not 0 <= first <= last < 2**62:
                raise ValueError(f"data_offsets {[first, last]} are not 0 <= begin <= end")
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"{path}: tensor {name!r} has a malformed entry: {error}; {FETCH_AGAIN}") from error
        if last - first != nbytes:
            raise StorageError(
                f"{path}: tensor {name!r} ({kind[0]} {list(kind[1])}) needs {nbytes:,} bytes, "
                f"its data_offsets span {last - first:,}; {FETCH_AGAIN}"
            )
        kinds.append(kind)
        begin[row], end[row] = first, last
    return list(entries), kinds, begin, end


def _checked_kind(kind: Kind) -> tuple[Kind, int]:
    dtype, shape = kind
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is unknown")
    if len(shape) > MAX_DIMENSIONS or any(type(size) is not int or not 0 <= size < 2**62 for size in shape):
        raise ValueError("shape is not a short list of sizes")
    return kind, math.prod(shape) * DTYPE_BYTES[dtype]


def _check_overlap(header: ShardHeader) -> None:
    filled = np.flatnonzero(header.end > header.begin)  # an empty tensor may lie anywhere
    order = filled[np.argsort(header.begin[filled], kind="stable")]
    clash = np.flatnonzero(header.begin[order][1:] < header.end[order][:-1])
    if len(clash):
        one, other = header.names[order[clash[0]]], header.names[order[clash[0] + 1]]
        raise StorageError(f"{header.path}: tensors {one!r} and {other!r} overlap; {FETCH_AGAIN}")
