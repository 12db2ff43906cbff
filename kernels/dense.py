"""Dense layers of the trunk: float32 activations times bf16 weights (k3-spec §2.3, design §8)."""

import numpy as np
from numba import njit, prange

from kernels.dot import dot4_bf16, dot_bf16

_BLOCK = 4  # output rows computed together: four weight streams keep the memory system busy


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


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """y = x Wᵀ: `x` float32 [R, K], `weight` bf16 bits uint16 [N, K], both C-contiguous; returns float32 [R, N].

    A row's bits do not depend on R, on the thread count or on the instruction set.
    """
    assert x.dtype == np.float32
    assert weight.dtype == np.uint16
    assert x.shape[1] == weight.shape[1]
    assert x.flags.c_contiguous
    assert weight.flags.c_contiguous
    out = np.empty((x.shape[0], weight.shape[0]), np.float32)
    _linear_bf16(x, weight, out)
    return out
