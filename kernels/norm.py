"""RMS norm (k3-spec §3.0), all in float32."""

import numpy as np
from numba import njit, prange

from kernels.dot import dot_f32


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _rms_norm(x, weight, eps, out):
    rows, width = x.shape
    for r in prange(rows):
        at = x.ctypes.data + 4 * width * r
        scale = np.float32(1.0) / np.sqrt(dot_f32(at, at, width) / np.float32(width) + eps)
        for i in range(width):
            out[r, i] = x[r, i] * scale * weight[i]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x²) + eps) · w: `x` float32 [R, N] C-contiguous, `weight` float32 [N]; returns float32 [R, N]."""
    assert x.dtype == np.float32
    assert x.flags.c_contiguous
    assert x.shape[1] == weight.shape[0]
    out = np.empty_like(x)
    _rms_norm(x, weight, np.float32(eps), out)
    return out
