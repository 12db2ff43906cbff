"""Attention Residuals: a softmax mix of block snapshots and the running sum, per token (k3-spec §3.2)."""

import numpy as np
from numba import njit, prange

from kernels.activation import exp32
from kernels.dot import dot_f32
from kernels.simd import fma


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _mix(sources, count, gamma, eps, out):
    rows, width = out.shape
    plane = sources.shape[1] * width
    base, gamma_at = sources.ctypes.data, gamma.ctypes.data
    for r in prange(rows):
        weights = np.empty(count, np.float32)
        top = np.float32(-np.inf)
        for s in range(count):
            at = base + 4 * (s * plane + r * width)
            mean = dot_f32(at, at, width) / np.float32(width)
            weights[s] = dot_f32(gamma_at, at, width) / np.sqrt(mean + eps)
            top = max(top, weights[s])
        total = np.float32(0.0)
        for s in range(count):
            weights[s] = exp32(weights[s] - top)
            total += weights[s]
        for i in range(width):
            out[r, i] = (weights[0] / total) * sources[0, r, i]
        for s in range(1, count):
            share = weights[s] / total
            for i in range(width):
                out[r, i] = fma(share, sources[s, r, i], out[r, i])


def mix(sources: np.ndarray, count: int, gamma: np.ndarray, eps: float) -> np.ndarray:
    """Mix the first `count` of `sources` float32 [S, R, D]: snapshots in order, the running sum last.

    `gamma` float32 [D] is res_norm.weight ⊙ res_proj.weight[0]. Returns float32 [R, D]; count 1 is a copy (a softmax
    over one source is 1).
    """
    assert sources.dtype == np.float32
    assert sources.flags.c_contiguous
    assert 1 <= count <= sources.shape[0]
    assert gamma.dtype == np.float32
    assert gamma.flags.c_contiguous
    assert gamma.shape == sources.shape[2:]
    out = np.empty(sources.shape[1:], np.float32)
    _mix(sources, count, gamma, np.float32(eps), out)
    return out
