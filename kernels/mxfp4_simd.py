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
limb_sum, byte_min, byte_max, least_and_most = isa.limb_sum, isa.byte_min, isa.byte_max, isa.least_and_most
row_bias = isa.row_bias


@njit(forceinline=True, error_model="numpy")
def new_limbs(rows, k):
    """Zeroed int8 limbs for `rows` tokens of width `k`, and int64 [rows, groups + 1] for their sums."""
    return np.zeros((rows, (k + _BLOCK - 1) // _BLOCK * _LIMB_BYTES), np.int8), np.zeros(
        (rows, k // GROUP + 1), np.int64
    )


@njit(forceinline=True, error_model="numpy")
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


@njit(forceinline=True, error_model="numpy")
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


@njit(forceinline=True, error_model="numpy")
def _tail_scales(scales, first):
    """The scale bytes of a row from `first` on, fewer than a block has, in an int32."""
    word = np.int32(0)
    for g in range(first, scales.shape[0]):
        word |= np.int32(scales[g]) << np.int32(8 * (g - first))
    return word


@njit(forceinline=True, error_model="numpy")
def _token(low, high, scale, x, a0, a1, a2):
    """Add the products of a block's weights and the limbs at a byte address to three accumulators."""
    a0 = accumulate(a0, low, load(x), high, load(x + _BLOCK_BYTES), scale)
    a1 = accumulate(a1, low, load(x + 2 * _BLOCK_BYTES), high, load(x + 3 * _BLOCK_BYTES), scale)
    a2 = accumulate(a2, low, load(x + 4 * _BLOCK_BYTES), high, load(x + 5 * _BLOCK_BYTES), scale)
    return a0, a1, a2


@njit(forceinline=True, error_model="numpy")
def _look_up_block(packed, scales, block, base, tables):
    """(even weights, odd weights, scale) of a whole block; the bytes that come later are asked for."""
    at = packed.ctypes.data + _BLOCK_BYTES * block
    prefetch(at + _AHEAD)
    q = load(at)
    scale = scaling(tables, load_scales(scales.ctypes.data + _GROUPS * block), base)
    table = group_table(tables, scale)
    return look_up(table, low_nibbles(q)), look_up(table, high_nibbles(q)), scale


@njit(forceinline=True, error_model="numpy")
def _look_up_tail(packed, scales, block, base, tables):
    """`_look_up_block` for the bytes behind the last whole block."""
    first = _BLOCK_BYTES * block
    q = load_tail(packed.ctypes.data + first, packed.shape[0] - first)
    scale = scaling(tables, _tail_scales(scales, _GROUPS * block), base)
    table = group_table(tables, scale)
    return look_up(table, low_nibbles(q)), look_up(table, high_nibbles(q)), scale


@njit(forceinline=True, error_model="numpy")
def _row1(packed, scales, base, x, tables):
    """Integer dot product of a row's groups at exponents base .. base + REACH - 1 with one token, bias included."""
    whole = packed.shape[0] // _BLOCK_BYTES
    a0, a1, a2 = zero(), zero(), zero()
    for block in range(whole):
        low, high, scale = _look_up_block(packed, scales, block, base, tables)
        a0, a1, a2 = _token(low, high, scale, x + _LIMB_BYTES * block, a0, a1, a2)
    if _BLOCK_BYTES * whole < packed.shape[0]:
        low, high, scale = _look_up_tail(packed, scales, whole, base, tables)
        a0, a1, a2 = _token(low, high, scale, x + _LIMB_BYTES * whole, a0, a1, a2)
    return limb_sum(a0, a1, a2)


@njit(forceinline=True, error_model="numpy")
def _pair1(p, ps, p_base, r, rs, r_base, x, tables):
    """`_row1` for two rows of one width: what is loaded of the token serves both."""
    whole = p.shape[0] // _BLOCK_BYTES
    a0, a1, a2, b0, b1, b2 = zero(), zero(), zero(), zero(), zero(), zero()
    for block in range(whole):
        low, high, scale = _look_up_block(p, ps, block, p_base, tables)
        even, odd, factor = _look_up_block(r, rs, block, r_base, tables)
        a0, a1, a2 = _token(low, high, scale, x + _LIMB_BYTES * block, a0, a1, a2)
        b0, b1, b2 = _token(even, odd, factor, x + _LIMB_BYTES * block, b0, b1, b2)
    if _BLOCK_BYTES * whole < p.shape[0]:
        low, high, scale = _look_up_tail(p, ps, whole, p_base, tables)
        even, odd, factor = _look_up_tail(r, rs, whole, r_base, tables)
        a0, a1, a2 = _token(low, high, scale, x + _LIMB_BYTES * whole, a0, a1, a2)
        b0, b1, b2 = _token(even, odd, factor, x + _LIMB_BYTES * whole, b0, b1, b2)
    return limb_sum(a0, a1, a2), limb_sum(b0, b1, b2)


@njit(forceinline=True, error_model="numpy")
def _pair2(p, ps, p_base, r, rs, r_base, x, y, tables):
    """`_pair1` for two tokens: rows p and r of token x, then of token y. What is looked up serves both."""
    whole = p.shape[0] // _BLOCK_BYTES
    a0, a1, a2, b0, b1, b2 = zero(), zero(), zero(), zero(), zero(), zero()
    c0, c1, c2, d0, d1, d2 = zero(), zero(), zero(), zero(), zero(), zero()
    for block in range(whole):
        at = _LIMB_BYTES * block
        low, high, scale = _look_up_block(p, ps, block, p_base, tables)
        even, odd, factor = _look_up_block(r, rs, block, r_base, tables)
        a0, a1, a2 = _token(low, high, scale, x + at, a0, a1, a2)
        b0, b1, b2 = _token(even, odd, factor, x + at, b0, b1, b2)
        c0, c1, c2 = _token(low, high, scale, y + at, c0, c1, c2)
        d0, d1, d2 = _token(even, odd, factor, y + at, d0, d1, d2)
    if _BLOCK_BYTES * whole < p.shape[0]:
        at = _LIMB_BYTES * whole
        low, high, scale = _look_up_tail(p, ps, whole, p_base, tables)
        even, odd, factor = _look_up_tail(r, rs, whole, r_base, tables)
        a0, a1, a2 = _token(low, high, scale, x + at, a0, a1, a2)
        b0, b1, b2 = _token(even, odd, factor, x + at, b0, b1, b2)
        c0, c1, c2 = _token(low, high, scale, y + at, c0, c1, c2)
        d0, d1, d2 = _token(even, odd, factor, y + at, d0, d1, d2)
    return limb_sum(a0, a1, a2), limb_sum(b0, b1, b2), limb_sum(c0, c1, c2), limb_sum(d0, d1, d2)


@njit(forceinline=True, error_model="numpy")
def _to_float(total, activation_scale, unit):
    """The one conversion to float32, written as in `kernels.mxfp4.row_dot`."""
    return np.float32(np.float64(total) * np.float64(activation_scale) * unit)


@njit(error_model="numpy")  # rare and long: not inlined, which would triple the time to compile
def _wide_row(packed, scales, low, high, limbs, sums, q, activation_scales, tables, out):
    """A row whose exponents span more than one reading, or more than integers can hold."""
    for m in range(out.shape[0]):
        if high == 255 or high - low > SPAN:
            out[m] = row_dot(packed, scales, q[m], activation_scales[m])
            continue
        total = np.int64(0)
        for step in range(0, high - low + 1, REACH):
            total += _row1(packed, scales, np.int32(low + step), limbs[m].ctypes.data, tables) << step
        total -= row_bias(scales, sums[m], low, high)
        out[m] = _to_float(total, activation_scales[m], 2.0 ** np.float64(low - 128))


@njit(error_model="numpy")
def row_pair(p, ps, r, rs, limbs, sums, q, activation_scales, tables, p_out, r_out):
    """Outputs of two rows for each of M tokens, as `kernels.mxfp4.row_dot` defines them.

    `p`, `r` uint8 [K/2] and `ps`, `rs` uint8 [K/32] are the rows; `limbs` int8 [M, …] and `sums` int64 [M, K/32 + 1] as
    from `split_limbs`, `q` int32 [M, K] and `activation_scales` float32 [M] the tokens; `p_out`, `r_out` float32 [M].
    """
    p_low, p_high = scale_range(ps)
    r_low, r_high = scale_range(rs)
    if p_high - p_low >= REACH or r_high - r_low >= REACH or p_high == 255 or r_high == 255:
        _wide_row(p, ps, p_low, p_high, limbs, sums, q, activation_scales, tables, p_out)
        _wide_row(r, rs, r_low, r_high, limbs, sums, q, activation_scales, tables, r_out)
        return
    p_base, r_base = np.int32(p_low), np.int32(r_low)
    p_unit, r_unit = 2.0 ** np.float64(p_low - 128), 2.0 ** np.float64(r_low - 128)
    stride, at = limbs.shape[1], limbs.ctypes.data
    twos = p_out.shape[0] // 2 * 2
    for m in range(0, twos, 2):
        x = at + stride * m
        a, b, c, d = _pair2(p, ps, p_base, r, rs, r_base, x, x + stride, tables)
        n = m + 1
        p_out[m] = _to_float(a - row_bias(ps, sums[m], p_low, p_high), activation_scales[m], p_unit)
        r_out[m] = _to_float(b - row_bias(rs, sums[m], r_low, r_high), activation_scales[m], r_unit)
        p_out[n] = _to_float(c - row_bias(ps, sums[n], p_low, p_high), activation_scales[n], p_unit)
        r_out[n] = _to_float(d - row_bias(rs, sums[n], r_low, r_high), activation_scales[n], r_unit)
    for m in range(twos, p_out.shape[0]):
        a, b = _pair1(p, ps, p_base, r, rs, r_base, at + stride * m, tables)
        p_out[m] = _to_float(a - row_bias(ps, sums[m], p_low, p_high), activation_scales[m], p_unit)
        r_out[m] = _to_float(b - row_bias(rs, sums[m], r_low, r_high), activation_scales[m], r_unit)
