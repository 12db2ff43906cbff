"""A pack: the quantised matrices of one checkpoint in one safetensors file, ready to be read in row blocks.

Scales of all matrices come first, together, because they are always held in memory. Then the rows of each matrix, from
a multiple of 4096 on: any program that reads safetensors can list them (`NAME.scales` F32 [N], `NAME.rows` U8
[N, row_bytes], `padding.I` between). `__metadata__` says what the pack is of, and the CRC-32 of the rows and of the
scales of every matrix; a matrix that is not built yet has dashes there.
"""

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from storage.blocks import Block
from storage.direct_io import ALIGNMENT
from storage.errors import StorageError
from storage.safetensors_index import MAX_HEADER_BYTES

KIND = "moe-streamer trunk pack"
VERSION = "1"
AGAIN = "Delete it; it is built again at the next start."

_SUMS = b'"crc32":"'
_BLANK = "-" * 16  # eight hex digits of the rows, eight of the scales


@dataclass(frozen=True, slots=True)
class PackMatrix:
    """One quantised matrix: N records of `row_bytes` and N scales."""

    name: str
    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of its rows."""
        return self.rows * self.row_bytes


class PackLayout:
    """Where everything in a pack lies: it follows from what the pack is of."""

    def __init__(self, fingerprint: str, trunk_format: str, matrices: Sequence[PackMatrix]) -> None:
        self.fingerprint = fingerprint
        self.format = trunk_format
        self.matrices = tuple(matrices)
        self.index = {matrix.name: i for i, matrix in enumerate(self.matrices)}
        tensors, scales_at, rows_at, end = _place(self.matrices)
        metadata = {
            "kind": KIND,
            "version": VERSION,
            "format": trunk_format,
            "fingerprint": fingerprint,
            "crc32": " ".join([_BLANK] * len(self.matrices)),
        }
        text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        self.header = len(text).to_bytes(8, "little") + text
        """The first bytes of the file, with dashes for sums."""
        self.nbytes = len(self.header) + end
        """Size of the file."""
        self._scales_at = [len(self.header) + at for at in scales_at]
        self._rows_at = [len(self.header) + at for at in rows_at]
        self._sums_at = self.header.index(_SUMS) + len(_SUMS)

    def scales_at(self, i: int) -> int:
        """Where in the file the scales of matrix `i` begin."""
        return self._scales_at[i]

    def rows_at(self, i: int) -> int:
        """Where in the file the rows of matrix `i` begin: a multiple of 4096."""
        return self._rows_at[i]

    def sums_at(self, i: int) -> int:
        """Where in the file the sums of matrix `i` are."""
        return self._sums_at + i * (len(_BLANK) + 1)

    def sums(self, header: bytes) -> list[tuple[int, int] | None]:
        """Sums (of rows, of scales) in `header`, None for matrices that are not built.

        Raises StorageError saying why, where it is not a header of this layout.
        """
        if header == self.header:
            return [None] * len(self.matrices)
        masked, found = bytearray(header), []
        try:
            for i in range(len(self.matrices)):
                at = self.sums_at(i)
                text = header[at : at + len(_BLANK)].decode("ascii")
                masked[at : at + len(_BLANK)] = _BLANK.encode()
                found.append(None if text == _BLANK else (int(text[:8], 16), int(text[8:], 16)))
        except ValueError:
            masked.clear()
        if masked != self.header:
            raise StorageError(self._difference(header))
        return found

    def _difference(self, header: bytes) -> str:
        """What a header that is not this layout's is instead."""
        try:
            metadata: Any = json.loads(header[8:])["__metadata__"]
            found = {key: metadata[key] for key in ("kind", "version", "format", "fingerprint")}
        except (ValueError, KeyError, TypeError):
            return "it is damaged, or no trunk pack"
        expected = {"kind": KIND, "version": VERSION, "format": self.format, "fingerprint": self.fingerprint}
        for key, value in expected.items():
            if found[key] != value:
                return f"expected {key} {value}, found {found[key]}"
        return "its tensors are not those of this model"


def _place(matrices: Sequence[PackMatrix]) -> tuple[dict[str, Any], list[int], list[int], int]:
    """Return header entries, begin of scales and of rows of each matrix, and the end, counted from the data's begin."""
    tensors: dict[str, Any] = {}
    scales_at, rows_at, end = [], [], 0

    def add(name: str, dtype: str, shape: list[int], nbytes: int) -> None:
        nonlocal end
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes

    for matrix in matrices:
        scales_at.append(end)
        add(f"{matrix.name}.scales", "F32", [matrix.rows], 4 * matrix.rows)
    for i, matrix in enumerate(matrices):
        gap = -end % ALIGNMENT
        if gap:
            add(f"padding.{i}", "U8", [gap], gap)  # the format allows no holes
        rows_at.append(end)
        add(f"{matrix.name}.rows", "U8", [matrix.rows, matrix.row_bytes], matrix.nbytes)
    return tensors, scales_at, rows_at, end


class TrunkPack:
    """A complete pack, open for reading. Header, size and scales are checked here; rows by `check`.

    Raises StorageError: not a pack of this layout, damaged, unreadable; with what to do.
    """

    def __init__(self, path: Path, layout: PackLayout) -> None:
        self.path = path
        self.format = layout.format
        self._layout = layout
        try:
            with path.open("rb") as file:
                self._sums = self._complete(_read_header(file))
                size = file.seek(0, os.SEEK_END)
                if size != layout.nbytes:
                    raise StorageError(f"{path}: expected {layout.nbytes:,} bytes, found {size:,}. {AGAIN}")
                self._scales = [self._read_scales(file, i) for i in range(len(layout.matrices))]
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}. {AGAIN}") from error

    def block(self, name: str) -> Block:
        """Where the rows of a matrix lie."""
        i = self._layout.index[name]
        return Block(self.path, self._layout.rows_at(i), self._layout.matrices[i].nbytes)

    def row_bytes(self, name: str) -> int:
        """Bytes of one row of a matrix."""
        return self._layout.matrices[self._layout.index[name]].row_bytes

    def scales(self, name: str) -> np.ndarray:
        """Float32 [N], one for each row of a matrix."""
        return self._scales[self._layout.index[name]]

    def check(self, name: str, rows: np.ndarray) -> None:
        """Compare all rows of a matrix, uint8, with the sum taken when they were made; raises StorageError."""
        expected, found = self._sums[self._layout.index[name]][0], zlib.crc32(rows.data)
        if expected != found:
            raise self._damaged(name, "rows", expected, found)

    def _complete(self, header: bytes) -> list[tuple[int, int]]:
        try:
            sums = self._layout.sums(header)
        except StorageError as error:
            raise StorageError(f"{self.path} is not the pack that is needed: {error}. {AGAIN}") from error
        known = [pair for pair in sums if pair is not None]
        if len(known) < len(sums):
            raise StorageError(f"{self.path} is not complete: {len(known)} of {len(sums)} matrices. {AGAIN}")
        return known

    def _read_scales(self, file: BinaryIO, i: int) -> np.ndarray:
        file.seek(self._layout.scales_at(i))
        data = file.read(4 * self._layout.matrices[i].rows)
        expected, found = self._sums[i][1], zlib.crc32(data)
        if expected != found:
            raise self._damaged(self._layout.matrices[i].name, "scales", expected, found)
        return np.frombuffer(data, np.dtype("<f4"))

    def _damaged(self, name: str, what: str, expected: int, found: int) -> StorageError:
        return StorageError(
            f"{self.path} is damaged: {what} of {name} have the CRC-32 {found:08x}, expected {expected:08x}. {AGAIN}"
        )


def _read_header(file: BinaryIO) -> bytes:
    """The header as long as the file says it is: one of another version too can be told apart."""
    head = file.read(8)
    length = int.from_bytes(head, "little")
    return head + (file.read(length) if length <= MAX_HEADER_BYTES else b"")
