"""Rows of int8: every weight is a signed byte times the scale of its row."""

import numpy as np
from numba import njit

from kernels.simd import bits_to_f32

_TOP = np.float32(127.0)
_SMALLEST = np.float32(1.1754944e-38)  # smallest normal float32


@njit(forceinline=True, error_model="numpy")
def magnitude_bits(bits):
    """The largest of bf16 [K] without their signs, as bits; 0x7F80 and above for infinity and NaN."""
    top = np.uint16(0)
    for i in range(bits.shape[0]):
        top = max(top, np.uint16(bits[i] & np.uint16(0x7FFF)))
    return top


@njit(forceinline=True, error_model="numpy")
def widen(bits):
    """bf16 is the upper half of a float32."""
    return bits_to_f32(np.uint32(bits) << np.uint32(16))


@njit(error_model="numpy")
def int8_row(bits, row):
    """Write bf16 bits [K] as a record, uint8 [K]; returns its scale: w ≈ scale · q, |q| ≤ 127. NaN or inf gives NaN."""
    top = magnitude_bits(bits)
    scale = widen(top) / _TOP
    if top >= 0x7F80 or scale < _SMALLEST:  # not finite, or zero at this precision
        row[:] = 0
        return np.float32(np.nan) if top >= 0x7F80 else np.float32(0.0)
    for i in range(bits.shape[0]):
        row[i] = np.uint8(np.int32(np.rint(widen(bits[i]) / scale)) & 255)
    return scale
