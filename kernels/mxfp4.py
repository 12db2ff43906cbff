"""MXFP4 rows as exact integers (k3-spec §2.4, design §8).

Activations are quantised to 23 bits (three 8-bit limbs) with one scale per token: beside the 24 bits of a float32
mantissa no error of their own shows, where 16 bits moved logits of random weights by 6e-3 and flipped experts (LEDGER).
A weight is value · 2^(scale byte − 127) with 2 · value an integer, so the dot product of a 32-group is an exact
integer, and a row is the sum of its groups shifted to the smallest exponent of the row: integers have no order of
addition, so no lane width, instruction set, thread count or number of rows can change a bit. One conversion to float32
at the end.

Where the exponents of a row span more than 24, groups below the top 24 are shifted right instead, each by itself: still
free of order, and lost bits weigh less than 2^-24 of the largest group's unit. A scale byte of 255 (NaN by the OCP
specification) makes the row NaN, which the layer's finiteness check reports.
"""

import numpy as np
from numba import njit

GROUP = 32  # weights that share a scale byte
SPAN = 24  # widest exponent span that is added exactly: 31 bits of group, 24 of shift, 8 of groups fit int64
_TOP = np.float32(4194303.0)  # 2^22 - 1: a group of 32 · 12 · 2^22 still fits int32
TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int32)  # 2 × value by nibble


@njit(forceinline=True, error_model="numpy")
def quantise_row(x, q):
    """Quantise float32 [K] to int32 `q` [K]; returns the scale: x ≈ scale · q, |q| < 2^22. NaN or inf gives NaN."""
    top = np.float32(0.0)
    finite = True
    for i in range(x.shape[0]):
        magnitude = abs(x[i])
        if not magnitude < np.float32(np.inf):
            finite = False
        top = max(top, magnitude)
    if not finite:
        q[:] = 0
        return np.float32(np.nan)
    scale = top / _TOP
    if scale < np.float32(1.1754944e-38):  # zero or subnormal: the row is zero at this precision
        q[:] = 0
        return np.float32(0.0)
    for i in range(x.shape[0]):
        q[i] = np.int32(np.rint(x[i] / scale))
    return scale


@njit(forceinline=True, error_model="numpy")
def row_base(scales):
    """The exponent to which a row's groups are shifted: its smallest scale byte, or the largest less SPAN."""
    low, high = np.int64(255), np.int64(0)
    for g in range(scales.shape[0]):
        e = np.int64(scales[g])
        low = min(low, e)
        high = max(high, e)
    return max(low, high - SPAN), high


@njit(forceinline=True, error_model="numpy")
def row_dot(packed, scales, q, activation_scale):
    """One output: `packed` uint8 [K/2], `scales` uint8 [K/32], `q` int32 [K] and its scale; returns float32."""
    base, high = row_base(scales)
    if high == 255:
        return np.float32(np.nan)
    total = np.int64(0)
    for g in range(scales.shape[0]):
        dot = np.int32(0)
        for j in range(GROUP // 2):
            byte = packed[g * (GROUP // 2) + j]
            at = g * GROUP + 2 * j
            dot += TWICE_E2M1[byte & 15] * q[at] + TWICE_E2M1[byte >> 4] * q[at + 1]
        shift = np.int64(scales[g]) - base
        if shift >= 0:
            total += np.int64(dot) << shift
        else:
            total += np.int64(dot) >> min(-shift, np.int64(63))
    # 2^(base - 127) for the scale byte, one more halving because the table holds twice the value
    return np.float32(np.float64(total) * np.float64(activation_scale) * 2.0 ** np.float64(base - 128))
