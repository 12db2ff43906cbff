"""The fused expert of `kernels.expert` on AVX-512 VNNI or AVX2. Import it only where `kernels.cpu` has one of them."""

import numpy as np
from numba import njit, prange

from kernels.activation import situ32
from kernels.mxfp4 import quantise_row
from kernels.mxfp4_simd import TABLES, load, new_limbs, row_pair, split_limbs

_ROWS = 16  # rows of w1 and of w3 that a thread takes at a time; their SiTU is one loop over contiguous floats


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _expert(z, rows, w1, s1, w2, s2, w3, s3, gate_cap, up_cap, tables, out):
    count, latent, width = rows.shape[0], z.shape[1], w1.shape[0]
    q, scale = np.empty((count, latent), np.int32), np.empty(count, np.float32)
    limbs, sums = new_limbs(count, latent)
    for m in range(count):
        scale[m] = quantise_row(z[rows[m]], q[m])
        split_limbs(q[m], limbs[m], sums[m])
    gate, up = np.empty((width, count), np.float32), np.empty((width, count), np.float32)
    hidden = np.empty((count, width), np.float32)
    for chunk in prange((width + _ROWS - 1) // _ROWS):
        table = load(tables.ctypes.data)
        first, last = chunk * _ROWS, min(chunk * _ROWS + _ROWS, width)
        for i in range(first, last):
            row_pair(w1[i], s1[i], w3[i], s3[i], limbs, sums, q, scale, table, gate[i], up[i])
        g, u = gate[first:last].reshape(-1), up[first:last].reshape(-1)
        for j in range(g.shape[0]):
            g[j] = situ32(g[j], u[j], gate_cap, up_cap)
        for i in range(first, last):
            for m in range(count):
                hidden[m, i] = gate[i, m]
    h = np.empty((count, width), np.int32)
    limbs, sums = new_limbs(count, width)
    for m in range(count):
        scale[m] = quantise_row(hidden[m], h[m])
        split_limbs(h[m], limbs[m], sums[m])
    down = np.empty((latent, count), np.float32)
    half = latent // 2  # rows half a matrix apart: two streams a thread (latent is a multiple of 32)
    for i in prange(half):
        table, j = load(tables.ctypes.data), half + i
        row_pair(w2[i], s2[i], w2[j], s2[j], limbs, sums, h, scale, table, down[i], down[j])
        for m in range(count):
            out[m, i], out[m, j] = down[i, m], down[j, m]


def run(z, rows, tensors, gate_cap, up_cap, out):
    """Fill `out` float32 [M, latent]; arguments as in `kernels.expert.expert_mlp`, `tensors` as `ExpertShape.split`."""
    _expert(z, rows, *tensors, gate_cap, up_cap, TABLES, out)
