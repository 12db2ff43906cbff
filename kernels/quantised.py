"""Matrices of small integers: int8 with one scale a row, int4 with integer sub-scales under it (design §7).

A weight is integer · row scale. In int8 the integer is the byte. In int4 it is nibble · sub-scale, one sub-scale for 32
columns: an integer too, so a row is one exact integer dot product in either format (`kernels.dense`).

A row is one record of bytes, so that a matrix can be cut anywhere between rows and read from a file into any address:
int8: K signed bytes. int4: ⌈K/32⌉ sub-scales (uint8), then 16 bytes a group, eight little-endian words; nibble j of
word l is column 8j + l of the group, signed. What pads the last group is zero.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit, prange

from kernels.int4 import GROUP, int4_row
from kernels.int8 import int8_row

FORMATS = ("int8", "int4")


def row_bytes(format: str, columns: int) -> int:  # noqa: A002 - the field's name
    """Bytes of one row of `columns` weights."""
    assert format in FORMATS, format
    return columns if format == "int8" else (columns + GROUP - 1) // GROUP * (1 + GROUP // 2)


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """N rows of K integers and their scales; the arrays may be views of memory that someone else owns."""

    format: str  # "int8" | "int4"
    rows: np.ndarray  # uint8 [N, row_bytes], C-contiguous, at any address
    scales: np.ndarray  # float32 [N]
    columns: int  # K

    def __post_init__(self) -> None:
        assert self.rows.dtype == np.uint8
        assert self.rows.shape == (self.scales.shape[0], row_bytes(self.format, self.columns))
        assert self.rows.flags.c_contiguous
        assert self.scales.dtype == np.float32

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.rows.shape[0], self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of records and scales."""
        return self.rows.nbytes + self.scales.nbytes

    def block(self, first: int, last: int) -> "QuantisedMatrix":
        """Rows first .. last - 1, without a copy."""
        return QuantisedMatrix(self.format, self.rows[first:last], self.scales[first:last], self.columns)


Matrix = np.ndarray | QuantisedMatrix  # an array holds bf16 bits, uint16 [N, K]


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _quantise(bits, nibbles, rows, scales):
    for i in prange(bits.shape[0]):
        scales[i] = int4_row(bits[i], rows[i]) if nibbles else int8_row(bits[i], rows[i])


def quantise(bits: np.ndarray, format: str) -> QuantisedMatrix:  # noqa: A002
    """Quantise bf16 bits uint16 [N, K], C-contiguous: the same bytes on any number of threads.

    A row with a NaN or an infinity gets the scale NaN, and with it NaN outputs.
    """
    assert bits.dtype == np.uint16
    assert bits.flags.c_contiguous
    n, k = bits.shape
    rows, scales = np.empty((n, row_bytes(format, k)), np.uint8), np.empty(n, np.float32)
    _quantise(bits, format == "int4", rows, scales)
    return QuantisedMatrix(format, rows, scales, k)
