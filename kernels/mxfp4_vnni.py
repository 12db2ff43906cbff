"""MXFP4 rows on AVX-512 VNNI: the same exact integers as `kernels.mxfp4.row_dot`, at the speed of memory.

A 16-byte quarter of a register is exactly one 32-group, and a byte shuffle looks up within quarters: so the group's
scale goes into its look-up table, (2 · value) << (exponent − base), and a whole row is one integer dot product. Four
exponents fit a byte (12 << 3 = 96, both signs); a row that spans more is read once per four, which is rare. Tables are
biased by 96 to be unsigned, and 96 · Σ q is taken off at the end, so the bias costs nothing.

Activations are three signed bytes, q = l0 + 2^8 l1 + 2^16 l2, of even elements and of odd ones: for every 64 packed
bytes, six runs of 64 bytes (even l0, odd l0, even l1, …), zero behind the end of the row.
"""

import numpy as np
from numba import njit

from kernels.mxfp4 import SPAN, TWICE_E2M1, row_dot
from kernels.vnni import (
    dot_bytes,
    group_tables,
    high_nibbles,
    iload,
    iload_tail,
    isum,
    izero,
    least_and_most,
    load_word,
    look_up,
    low_nibbles,
    prefetch,
)

BLOCK = 128  # weights in 64 packed bytes
LIMB_BYTES = 6 * 64  # of one block of activations
_BIAS = 96
_BIAS_WORD = np.int32(0x60606060)
_EXPONENTS = 4  # tables in one register
_AHEAD = 2048  # bytes of a weight stream to have on the way
TABLES = np.concatenate([(TWICE_E2M1 << shift) + _BIAS for shift in range(_EXPONENTS)]).astype(np.uint8)


@njit(inline="always")
def split_limbs(q, limbs):
    """Write `q` int32 [K] as limbs int8 [blocks · 384], which are zero; returns Σ q."""
    total = np.int64(0)
    for i in range(q.shape[0]):
        value = q[i]
        total += value
        at = (i // BLOCK) * LIMB_BYTES + (i % 2) * 64 + (i % BLOCK) // 2
        for limb in range(3):
            low = np.int32(np.int8(value & 255))
            limbs[at + 128 * limb] = low
            value = (value - low) >> 8
    return total


@njit(inline="always")
def _token(low, high, limbs, a0, a1, a2):
    """Add 128 products of looked-up weights and the limbs at a byte address to three accumulators."""
    a0 = dot_bytes(dot_bytes(a0, low, iload(limbs)), high, iload(limbs + 64))
    a1 = dot_bytes(dot_bytes(a1, low, iload(limbs + 128)), high, iload(limbs + 192))
    a2 = dot_bytes(dot_bytes(a2, low, iload(limbs + 256)), high, iload(limbs + 320))
    return a0, a1, a2


@njit(inline="always")
def _combine(a0, a1, a2):
    """Σ lanes of the limbs as one integer."""
    return np.int64(isum(a0)) + (np.int64(isum(a1)) << 8) + (np.int64(isum(a2)) << 16)


@njit(inline="always")
def _tail_scales(scales, first):
    """The last one to three scale bytes of a row in an int32."""
    word = np.int32(0)
    for g in range(first, scales.shape[0]):
        word |= np.int32(scales[g]) << np.int32(8 * (g - first))
    return word


@njit(inline="always")
def scale_range(scales):
    """Smallest and largest scale byte of a row, uint8 [groups]."""
    count = scales.shape[0]
    if count < 64 or count > 128:
        low, high = np.int64(255), np.int64(0)
        for g in range(count):
            e = np.int64(scales[g])
            low, high = min(low, e), max(high, e)
        return low, high
    at = scales.ctypes.data  # two loads that overlap cover 64 to 128 bytes
    both = np.int64(least_and_most(iload(at), iload(at + count - 64)))
    return both & 255, both >> 8


@njit(inline="always")
def _look_up_tail(packed, scales, base, tables):
    """Weights of the last packed bytes of a row that do not fill a block: (even elements, odd elements)."""
    first = packed.shape[0] // 64
    q = iload_tail(packed.ctypes.data + 64 * first, packed.shape[0] - 64 * first)
    table = group_tables(tables, _tail_scales(scales, 4 * first), base, _BIAS_WORD)
    return look_up(table, low_nibbles(q)), look_up(table, high_nibbles(q))


@njit(inline="always")
def _row1(packed, scales, base, limbs, tables):
    """Integer dot product of one row's groups at exponents base .. base + 3 with one token, bias included."""
    w, s, whole = packed.ctypes.data, scales.ctypes.data, packed.shape[0] // 64
    a0, a1, a2 = izero(), izero(), izero()
    for block in range(whole):
        at = w + 64 * block
        prefetch(at + _AHEAD)
        q = iload(at)
        table = group_tables(tables, load_word(s + 4 * block), base, _BIAS_WORD)
        low, high = look_up(table, low_nibbles(q)), look_up(table, high_nibbles(q))
        a0, a1, a2 = _token(low, high, limbs + LIMB_BYTES * block, a0, a1, a2)
    if 64 * whole < packed.shape[0]:
        low, high = _look_up_tail(packed, scales, base, tables)
        a0, a1, a2 = _token(low, high, limbs + LIMB_BYTES * whole, a0, a1, a2)
    return _combine(a0, a1, a2)


@njit(inline="always")
def _row4(packed, scales, base, limbs, stride, tables):
    """`_row1` for four tokens whose limbs lie `stride` bytes apart: the weights are looked up once."""
    w, s, whole = packed.ctypes.data, scales.ctypes.data, packed.shape[0] // 64
    a0, a1, a2, b0, b1, b2 = izero(), izero(), izero(), izero(), izero(), izero()
    c0, c1, c2, d0, d1, d2 = izero(), izero(), izero(), izero(), izero(), izero()
    for block in range(whole):
        at, x = w + 64 * block, limbs + LIMB_BYTES * block
        prefetch(at + _AHEAD)
        q = iload(at)
        table = group_tables(tables, load_word(s + 4 * block), base, _BIAS_WORD)
        low, high = look_up(table, low_nibbles(q)), look_up(table, high_nibbles(q))
        a0, a1, a2 = _token(low, high, x, a0, a1, a2)
        b0, b1, b2 = _token(low, high, x + stride, b0, b1, b2)
        c0, c1, c2 = _token(low, high, x + 2 * stride, c0, c1, c2)
        d0, d1, d2 = _token(low, high, x + 3 * stride, d0, d1, d2)
    if 64 * whole < packed.shape[0]:
        low, high = _look_up_tail(packed, scales, base, tables)
        x = limbs + LIMB_BYTES * whole
        a0, a1, a2 = _token(low, high, x, a0, a1, a2)
        b0, b1, b2 = _token(low, high, x + stride, b0, b1, b2)
        c0, c1, c2 = _token(low, high, x + 2 * stride, c0, c1, c2)
        d0, d1, d2 = _token(low, high, x + 3 * stride, d0, d1, d2)
    return _combine(a0, a1, a2), _combine(b0, b1, b2), _combine(c0, c1, c2), _combine(d0, d1, d2)


@njit(inline="always")
def row_dots(packed, scales, limbs, q, activation_scales, sums, tables, out):
    """One output for each of M tokens, as `kernels.mxfp4.row_dot` defines it.

    `packed` uint8 [K/2] and `scales` uint8 [K/32] are a row; `limbs` int8 [M, ...], `q` int32 [M, K], `sums` int64 [M]
    (Σ q) and `activation_scales` float32 [M] the tokens; `out` float32 [M].
    """
    low, high = scale_range(scales)
    if high == 255 or high - low > SPAN:
        for m in range(out.shape[0]):
            out[m] = row_dot(packed, scales, q[m], activation_scales[m])
        return
    unit = 2.0 ** np.float64(low - 128)
    stride, at = limbs.shape[1], limbs.ctypes.data
    fours = out.shape[0] // 4 * 4
    for m in range(0, fours, 4):
        t0, t1, t2, t3 = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        for step in range(0, high - low + 1, _EXPONENTS):
            p0, p1, p2, p3 = _row4(packed, scales, np.int32(low + step), at + stride * m, stride, tables)
            t0 += (p0 - _BIAS * sums[m]) << step
            t1 += (p1 - _BIAS * sums[m + 1]) << step
            t2 += (p2 - _BIAS * sums[m + 2]) << step
            t3 += (p3 - _BIAS * sums[m + 3]) << step
        out[m] = _to_float(t0, activation_scales[m], unit)
        out[m + 1] = _to_float(t1, activation_scales[m + 1], unit)
        out[m + 2] = _to_float(t2, activation_scales[m + 2], unit)
        out[m + 3] = _to_float(t3, activation_scales[m + 3], unit)
    for m in range(fours, out.shape[0]):
        total = np.int64(0)
        for step in range(0, high - low + 1, _EXPONENTS):
            part = _row1(packed, scales, np.int32(low + step), at + stride * m, tables)
            total += (part - _BIAS * sums[m]) << step
        out[m] = _to_float(total, activation_scales[m], unit)


@njit(inline="always")
def _to_float(total, activation_scale, unit):
    """The one conversion to float32, written as in `kernels.mxfp4.row_dot`."""
    return np.float32(np.float64(total) * np.float64(activation_scale) * unit)
