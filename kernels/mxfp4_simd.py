"""MXFP4 rows at the speed of memory: the same exact integers as `kernels.mxfp4.row_dot`, on AVX-512 VNNI or AVX2.

A row is read in blocks of one register. Its exponents are taken `REACH` at a time, so that a row that spans more is
read again, which is rare; a group outside the present reach counts as zero. Tables are biased to be unsigned, and the
bias is taken off at the end (`row_bias`).

Activations are three signed bytes, q = l0 + 2^8 l1 + 2^16 l2, of even elements and of odd ones: for every block, six
registers (even l0, odd l0, even l1, …), zero behind the end of the row.
"""

import numpy as np
from numba import njit

from kernels.cpu import HAS_VNNI
from kernels.mxfp4 import GROUP, SPAN, row_dot
from kernels.simd import prefetch

if HAS_VNNI:
    from kernels import vnni as isa
else:
    from kernels import avx2 as isa  # type: ignore[no-redef]

TABLES = isa.TABLES
REACH = isa.REACH
_BLOCK_BYTES = isa.REGISTER_BYTES
_BLOCK = 2 * _BLOCK_BYTES  # weights
_GROUPS = _BLOCK // GROUP
_LIMB_BYTES = 6 * _BLOCK_BYTES  # of one block of activations
_AHEAD = 2048  # bytes of a weight stream to have on the way

zero, load, load_tail, load_scales = isa.zero, isa.load, isa.load_tail, isa.load_scales
low_nibbles, high_nibbles, look_up = isa.low_nibbles, isa.high_nibbles, isa.look_up
scaling, group_table, accumulate = isa.scaling, isa.group_table, isa.accumulate
lane_sum, byte_min, byte_max, least_and_most = isa.lane_sum, isa.byte_min, isa.byte_max, isa.least_and_most
row_bias = isa.row_bias


@njit(inline="always")
def new_limbs(rows, k):
    """Zeroed int8 limbs for `rows` tokens of width `k`, and int64 [rows, groups + 1] for their sums."""
    return np.zeros((rows, (k + _BLOCK - 1) // _BLOCK * _LIMB_BYTES), np.int8), np.zeros(
        (rows, k // GROUP + 1), np.int64
    )


@njit(inline="always")
def split_limbs(q, limbs, sums):
    """Write `q` int32 [K] as limbs, and Σ q of each group, then of all, into `sums`; both zero before."""
    groups = sums.shape[0] - 1
    for i in range(q.shape[0]):
        value = q[i]
        sums[i // GROUP] += value
        sums[groups] += value
        at = (i // _BLOCK) * _LIMB_BYTES + (i % 2) * _BLOCK_BYTES + (i % _BLOCK) // 2
        for limb in range(3):
            low = np.int32(np.int8(value & 255))
            limbs[at + 2 * _BLOCK_BYTES * limb] = low
            value = (value - low) >> 8


@njit(inline="always")
def scale_range(scales):
    """Smallest and largest scale byte of a row, uint8 [groups]."""
    count = scales.shape[0]
    if count < _BLOCK_BYTES:
        low, high = np.int64(255), np.int64(0)
        for g in range(count):
            e = np.int64(scales[g])
            low, high = min(low, e), max(high, e)
        return low, high
    at = scales.ctypes.data
    least = load(at + count - _BLOCK_BYTES)  # overlaps the last whole register
    most = least
    for first in range(0, count - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        more = load(at + first)
        least, most = byte_min(least, more), byte_max(most, more)
    both = np.int64(least_and_most(least, most))
    return both & 255, both >> 8


@njit(inline="always")
def _tail_scales(scales, first):
    """The scale bytes of a row from `first` on, fewer than a block has, in an int32."""
    word = np.int32(0)
    for g in range(first, scales.shape[0]):
        word |= np.int32(scales[g]) << np.int32(8 * (g - first))
    return word


@njit(inline="always")
def _token(low, high, scale, x, a0, a1, a2):
    """Add the products of a block's weights and the limbs at a byte address to three accumulators."""
    a0 = accumulate(a0, low, load(x), high, load(x + _BLOCK_BYTES), scale)
    a1 = accumulate(a1, low, load(x + 2 * _BLOCK_BYTES), high, load(x + 3 * _BLOCK_BYTES), scale)
    a2 = accumulate(a2, low, load(x + 4 * _BLOCK_BYTES), high, load(x + 5 * _BLOCK_BYTES), scale)
    return a0, a1, a2


@njit(inline="always")
def _combine(a0, a1, a2):
    """The three limbs' sums as one integer."""
    return lane_sum(a0) + (lane_sum(a1) << 8) + (lane_sum(a2) << 16)


@njit(inline="always")
def _row1(packed, scales, base, limbs, tables):
    """Integer dot product of a row's groups at exponents base .. base + REACH - 1 with one token, bias included."""
    w, s, whole = packed.ctypes.data, scales.ctypes.data, packed.shape[0] // _BLOCK_BYTES
    a0, a1, a2 = zero(), zero(), zero()
    for block in range(whole):
        at = w + _BLOCK_BYTES * block
        prefetch(at + _AHEAD)
        q = load(at)
        scale = scaling(tables, load_scales(s + _GROUPS * block), base)
        table = group_table(tables, scale)
        low, high = look_up(table, low_nibbles(q)), look_up(table, high_nibbles(q))
        a0, a1, a2 = _token(low, high, scale, limbs + _LIMB_BYTES * block, a0, a1, a2)
    rest = packed.shape[0] - _BLOCK_BYTES * whole
    if rest:
        q = load_tail(w + _BLOCK_BYTES * whole, rest)
        scale = scaling(tables, _tail_scales(scales, _GROUPS * whole), base)
        table = group_table(tables, scale)
        low, high = look_up(table, low_nibbles(q)), look_up(table, high_nibbles(q))
        a0, a1, a2 = _token(low, high, scale, limbs + _LIMB_BYTES * whole, a0, a1, a2)
    return _combine(a0, a1, a2)


@njit(inline="always")
def _row4(packed, scales, base, limbs, stride, tables):
    """`_row1` for four tokens whose limbs lie `stride` bytes apart: the weights are looked up once."""
    w, s, whole = packed.ctypes.data, scales.ctypes.data, packed.shape[0] // _BLOCK_BYTES
    a0, a1, a2, b0, b1, b2 = zero(), zero(), zero(), zero(), zero(), zero()
    c0, c1, c2, d0, d1, d2 = zero(), zero(), zero(), zero(), zero(), zero()
    for block in range(whole):
        at, x = w + _BLOCK_BYTES * block, limbs + _LIMB_BYTES * block
        prefetch(at + _AHEAD)
        q = load(at)
        scale = scaling(tables, load_scales(s + _GROUPS * block), base)
        table = group_table(tables, scale)
        low, high = look_up(table, low_nibbles(q)), look_up(table, high_nibbles(q))
        a0, a1, a2 = _token(low, high, scale, x, a0, a1, a2)
        b0, b1, b2 = _token(low, high, scale, x + stride, b0, b1, b2)
        c0, c1, c2 = _token(low, high, scale, x + 2 * stride, c0, c1, c2)
        d0, d1, d2 = _token(low, high, scale, x + 3 * stride, d0, d1, d2)
    rest = packed.shape[0] - _BLOCK_BYTES * whole
    if rest:
        x = limbs + _LIMB_BYTES * whole
        q = load_tail(w + _BLOCK_BYTES * whole, rest)
        scale = scaling(tables, _tail_scales(scales, _GROUPS * whole), base)
        table = group_table(tables, scale)
        low, high = look_up(table, low_nibbles(q)), look_up(table, high_nibbles(q))
        a0, a1, a2 = _token(low, high, scale, x, a0, a1, a2)
        b0, b1, b2 = _token(low, high, scale, x + stride, b0, b1, b2)
        c0, c1, c2 = _token(low, high, scale, x + 2 * stride, c0, c1, c2)
        d0, d1, d2 = _token(low, high, scale, x + 3 * stride, d0, d1, d2)
    return _combine(a0, a1, a2), _combine(b0, b1, b2), _combine(c0, c1, c2), _combine(d0, d1, d2)


@njit(inline="always")
def row_dots(packed, scales, limbs, sums, q, activation_scales, tables, out):
    """One output for each of M tokens, as `kernels.mxfp4.row_dot` defines it.

    `packed` uint8 [K/2] and `scales` uint8 [K/32] are a row; `limbs` int8 [M, …] and `sums` int64 [M, K/32 + 1] as from
    `split_limbs`, `q` int32 [M, K] and `activation_scales` float32 [M] the tokens; `out` float32 [M].
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
        for step in range(0, high - low + 1, REACH):
            p0, p1, p2, p3 = _row4(packed, scales, np.int32(low + step), at + stride * m, stride, tables)
            t0, t1, t2, t3 = t0 + (p0 << step), t1 + (p1 << step), t2 + (p2 << step), t3 + (p3 << step)
        out[m] = _to_float(t0 - row_bias(scales, sums[m], low, high), activation_scales[m], unit)
        out[m + 1] = _to_float(t1 - row_bias(scales, sums[m + 1], low, high), activation_scales[m + 1], unit)
        out[m + 2] = _to_float(t2 - row_bias(scales, sums[m + 2], low, high), activation_scales[m + 2], unit)
        out[m + 3] = _to_float(t3 - row_bias(scales, sums[m + 3], low, high), activation_scales[m + 3], unit)
    for m in range(fours, out.shape[0]):
        total = np.int64(0)
        for step in range(0, high - low + 1, REACH):
            total += _row1(packed, scales, np.int32(low + step), at + stride * m, tables) << step
        out[m] = _to_float(total - row_bias(scales, sums[m], low, high), activation_scales[m], unit)


@njit(inline="always")
def _to_float(total, activation_scale, unit):
    """The one conversion to float32, written as in `kernels.mxfp4.row_dot`."""
    return np.float32(np.float64(total) * np.float64(activation_scale) * unit)
