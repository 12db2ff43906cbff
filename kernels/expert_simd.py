"""The fused expert of `kernels.expert` on AVX-512 VNNI or AVX2. Import it only where `kernels.cpu` has one of them."""

import numpy as np
from numba import njit, prange

from kernels.activation import situ32
from kernels.mxfp4 import quantise_row
from kernels.mxfp4_simd import TABLES, load, new_limbs, row_dots, split_limbs


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
    for i in prange(width):
        table = load(tables.ctypes.data)
        row_dots(w1[i], s1[i], limbs, sums, q, scale, table, gate[i])
        row_dots(w3[i], s3[i], limbs, sums, q, scale, table, up[i])
        for m in range(count):
            hidden[m, i] = situ32(gate[i, m], up[i, m], gate_cap, up_cap)
    h = np.empty((count, width), np.int32)
    limbs, sums = new_limbs(count, width)
    for m in range(count):
        scale[m] = quantise_row(hidden[m], h[m])
        split_limbs(h[m], limbs[m], sums[m])
    down = np.empty((latent, count), np.float32)
    for i in prange(latent):
        row_dots(w2[i], s2[i], limbs, sums, h, scale, load(tables.ctypes.data), down[i])
        for m in range(count):
            out[m, i] = down[i, m]


def run(z, rows, tensors, gate_cap, up_cap, out):
    """Fill `out` float32 [M, latent]; arguments as in `kernels.expert.expert_mlp`, `tensors` as `ExpertShape.split`."""
    _expert(z, rows, *tensors, gate_cap, up_cap, TABLES, out)
