"""Rows of int4: signed nibbles, an integer sub-scale for every 32 of them, and one scale for the row."""

import numpy as np
from numba import njit

from kernels.int8 import magnitude_bits, widen

GROUP = 32  # columns that share a sub-scale
SUB_TOP = 63  # largest sub-scale: |nibble · sub-scale| ≤ 504
_SMALLEST = np.float32(1.1754944e-38)  # smallest normal float32
_LOW, _HIGH = np.float32(-8.0), np.float32(7.0)


@njit(forceinline=True, error_model="numpy")
def _nibble(weight, step):
    return np.int32(min(max(np.rint(weight / step), _LOW), _HIGH))


@njit(error_model="numpy")
def int4_row(bits, row):
    """Write bf16 bits [K] as a record, uint8 [row_bytes]; returns the row's scale. NaN or inf gives NaN."""
    columns = bits.shape[0]
    groups = (columns + GROUP - 1) // GROUP
    top = magnitude_bits(bits)
    unit = widen(top) / np.float32(-_LOW * SUB_TOP)
    row[:] = 0
    if top >= 0x7F80 or unit < _SMALLEST:  # not finite, or zero at this precision
        return np.float32(np.nan) if top >= 0x7F80 else np.float32(0.0)
    for g in range(groups):
        first, last = GROUP * g, min(GROUP * g + GROUP, columns)
        reach = widen(magnitude_bits(bits[first:last])) / np.float32(-_LOW)
        sub = min(np.int32(np.ceil(reach / unit)), np.int32(SUB_TOP))
        row[g] = np.uint8(sub)
        if sub == 0:
            continue
        step = unit * np.float32(sub)
        for i in range(first, last):
            nibble = _nibble(widen(bits[i]), step) & 15
            at, j = i % GROUP % 8, i % GROUP // 8
            row[groups + GROUP // 2 * g + 2 * at + j // 2] |= np.uint8(nibble << (4 * (j % 2)))
    return unit
