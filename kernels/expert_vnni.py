"""The fused expert of `kernels.expert` on AVX-512 VNNI. Import it only where `kernels.cpu.HAS_VNNI`."""

import numpy as np
from numba import njit, prange

from kernels.activation import situ32
from kernels.mxfp4 import quantise_row
from kernels.mxfp4_vnni import BLOCK, LIMB_BYTES, TABLES, row_dots, split_limbs
from kernels.vnni import iload


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _expert(z, rows, w1, s1, w2, s2, w3, s3, gate_cap, up_cap, tables, out):
    count, latent, width = rows.shape[0], z.shape[1], w1.shape[0]
    q = np.empty((count, latent), np.int32)
    limbs = np.zeros((count, -(-latent // BLOCK) * LIMB_BYTES), np.int8)
    scale, total = np.empty(count, np.float32), np.empty(count, np.int64)
    for m in range(count):
        scale[m] = quantise_row(z[rows[m]], q[m])
        total[m] = split_limbs(q[m], limbs[m])
    gate = np.empty((width, count), np.float32)
    up = np.empty((width, count), np.float32)
    hidden = np.empty((count, width), np.float32)
    for i in prange(width):
        table = iload(tables.ctypes.data)
        row_dots(w1[i], s1[i], limbs, q, scale, total, table, gate[i])
        row_dots(w3[i], s3[i], limbs, q, scale, total, table, up[i])
        for m in range(count):
            hidden[m, i] = situ32(gate[i, m], up[i, m], gate_cap, up_cap)
    h = np.empty((count, width), np.int32)
    h_limbs = np.zeros((count, -(-width // BLOCK) * LIMB_BYTES), np.int8)
    for m in range(count):
        scale[m] = quantise_row(hidden[m], h[m])
        total[m] = split_limbs(h[m], h_limbs[m])
    down = np.empty((latent, count), np.float32)
    for i in prange(latent):
        row_dots(w2[i], s2[i], h_limbs, h, scale, total, iload(tables.ctypes.data), down[i])
        for m in range(count):
            out[m, i] = down[i, m]


def run(z, rows, tensors, gate_cap, up_cap, out):
    """Fill `out` float32 [M, latent]; arguments as in `kernels.expert.expert_mlp`, `tensors` as `ExpertShape.split`."""
    _expert(z, rows, *tensors, gate_cap, up_cap, TABLES, out)
