"""Dense layers of the trunk: float32 activations times bf16, int8 or int4 weights (k3-spec §2.3, design §8)."""

import numpy as np
from numba import njit, prange

from kernels.dot import dot4_bf16, dot_bf16
from kernels.int4 import GROUP
from kernels.quantised import Matrix, QuantisedMatrix
from kernels.simd import bits_to_f32

_BLOCK = 4  # output rows computed together: four weight streams keep the memory system busy
_TOP = np.float32(32767.0)
_SMALLEST = np.float32(1.1754944e-38)  # smallest normal float32


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _linear_bf16(x, w, out):
    rows, k = x.shape
    n = w.shape[0]
    x_at, w_at = x.ctypes.data, w.ctypes.data
    stride = 2 * k
    for block in prange((n + _BLOCK - 1) // _BLOCK):
        first = block * _BLOCK
        at = w_at + first * stride
        if first + _BLOCK <= n:
            for r in range(rows):
                a, b, c, d = dot4_bf16(x_at + 4 * k * r, at, stride, k)
                out[r, first] = a
                out[r, first + 1] = b
                out[r, first + 2] = c
                out[r, first + 3] = d
        else:
            for r in range(rows):
                for i in range(first, n):
                    out[r, i] = dot_bf16(x_at + 4 * k * r, w_at + i * stride, k)


@njit(forceinline=True, error_model="numpy")
def _quantise_row(x, q):
    """Quantise float32 [K] to int16 `q` [K]; returns the scale: x ≈ scale · q, |q| ≤ 32767. NaN or inf gives NaN."""
    bits, top = x.view(np.uint32), np.uint32(0)
    for i in range(bits.shape[0]):
        top = max(top, bits[i] & np.uint32(0x7FFFFFFF))
    scale = bits_to_f32(top) / _TOP
    if top >= 0x7F800000 or scale < _SMALLEST:  # not finite, or zero at this precision
        q[:] = 0
        return np.float32(np.nan) if top >= 0x7F800000 else np.float32(0.0)
    for i in range(x.shape[0]):
        q[i] = np.int16(np.rint(x[i] / scale))
    return scale


@njit(forceinline=True, error_model="numpy")
def _decode(row, nibbles, weights):
    """The integers of a record as int16 [K]."""
    groups = (weights.shape[0] + GROUP - 1) // GROUP
    for i in range(weights.shape[0]):
        if nibbles:
            at, j = i % GROUP % 8, i % GROUP // 8
            byte = row[groups + GROUP // 2 * (i // GROUP) + 2 * at + j // 2]
            nibble = np.int16(byte >> (4 * (j % 2)) & 15)
            weights[i] = (nibble - ((nibble & 8) << 1)) * np.int16(row[i // GROUP])
        else:
            weights[i] = np.int8(row[i])


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _linear_integers(x, nibbles, rows, scales, out):
    count, k = x.shape
    q, x_scale = np.empty((count, k), np.int16), np.empty(count, np.float32)
    for r in range(count):
        x_scale[r] = _quantise_row(x[r], q[r])
    for i in prange(rows.shape[0]):
        weights = np.empty(k, np.int16)
        _decode(rows[i], nibbles, weights)
        for r in range(count):
            total = np.int64(0)
            for c in range(k):
                total += np.int64(weights[c]) * np.int64(q[r, c])
            out[r, i] = np.float32(np.float64(total) * np.float64(x_scale[r]) * np.float64(scales[i]))


def linear(x: np.ndarray, weight: Matrix) -> np.ndarray:
    """y = x Wᵀ: `x` float32 [R, K], `weight` bf16 bits uint16 [N, K] or quantised; returns float32 [R, N].

    All arrays are C-contiguous; those of the weight may start at any byte. A row's bits do not depend on R, on the
    thread count or on the instruction set. With bf16, activations stay float32. With integers they are rounded to 16
    bits with one scale a row, and a NaN or an infinity among them makes the whole row NaN.
    """
    assert x.dtype == np.float32
    assert x.shape[1] == weight.shape[1]
    assert x.flags.c_contiguous
    out = np.empty((x.shape[0], weight.shape[0]), np.float32)
    if isinstance(weight, QuantisedMatrix):
        _linear_integers(x, weight.format == "int4", weight.rows, weight.scales, out)
        return out
    assert weight.dtype == np.uint16
    assert weight.flags.c_contiguous
    _linear_bf16(x, weight, out)
    return out
