"""One routed expert: w2 · situ(w1 z, w3 z) on its bytes as shipped (k3-spec §2.3, §3.6)."""

from dataclasses import dataclass

import numpy as np
from numba import njit, prange

from kernels.activation import situ32
from kernels.cpu import HAS_AVX2, HAS_VNNI
from kernels.mxfp4 import GROUP, quantise_row, row_dot


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Widths of an expert and where its six tensors start in its bytes: w1, w2, w3, each packed then scale."""

    latent: int
    intermediate: int

    def __post_init__(self) -> None:
        for width in (self.latent, self.intermediate):
            assert width % GROUP == 0, width
            assert width <= 256 * GROUP, f"{width}: more groups than an int64 row holds (kernels.mxfp4)"

    @property
    def matrix_bytes(self) -> tuple[int, int]:
        """Bytes of one packed matrix and of its scales; the same for w1, w2 and w3."""
        weights = self.latent * self.intermediate
        return weights // 2, weights // GROUP

    @property
    def nbytes(self) -> int:
        """Bytes of the whole expert."""
        return 3 * sum(self.matrix_bytes)

    def split(self, block: np.ndarray) -> tuple[np.ndarray, ...]:
        """Views of uint8 [nbytes]: (w1, s1, w2, s2, w3, s3), each [rows, bytes of a row]."""
        packed, scales = self.matrix_bytes
        views, at = [], 0
        for rows in (self.intermediate, self.latent, self.intermediate):
            for size in (packed, scales):
                views.append(block[at : at + size].reshape(rows, -1))
                at += size
        return tuple(views)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _expert(z, rows, w1, s1, w2, s2, w3, s3, gate_cap, up_cap, out):
    count, latent = rows.shape[0], z.shape[1]
    width = w1.shape[0]
    q = np.empty((count, latent), np.int32)
    q_scale = np.empty(count, np.float32)
    for m in range(count):
        q_scale[m] = quantise_row(z[rows[m]], q[m])
    hidden = np.empty((count, width), np.float32)
    for i in prange(width):
        for m in range(count):
            gate = row_dot(w1[i], s1[i], q[m], q_scale[m])
            up = row_dot(w3[i], s3[i], q[m], q_scale[m])
            hidden[m, i] = situ32(gate, up, gate_cap, up_cap)
    h = np.empty((count, width), np.int32)
    h_scale = np.empty(count, np.float32)
    for m in range(count):
        h_scale[m] = quantise_row(hidden[m], h[m])
    for i in prange(latent):
        for m in range(count):
            out[m, i] = row_dot(w2[i], s2[i], h[m], h_scale[m])


def run_portable(z, rows, tensors, gate_cap, up_cap, out):
    """Fill `out` float32 [M, latent] on any CPU; `tensors` as from `ExpertShape.split`."""
    _expert(z, rows, *tensors, gate_cap, up_cap, out)


if HAS_VNNI or HAS_AVX2:
    from kernels.expert_simd import run as _run
else:
    _run = run_portable


def expert_mlp(
    z: np.ndarray, rows: np.ndarray, block: np.ndarray, shape: ExpertShape, gate_cap: float, up_cap: float
) -> np.ndarray:
    """Apply one expert to some rows of the latent activations.

    `z` float32 [R, latent], `rows` int64 [M] the rows routed here, `block` uint8 [shape.nbytes] at any alignment.
    Returns float32 [M, latent]; a row's bits depend on that row and the expert alone.
    """
    assert block.dtype == np.uint8
    assert block.shape == (shape.nbytes,)
    assert z.shape[1] == shape.latent
    out = np.empty((rows.shape[0], shape.latent), np.float32)
    rows = np.ascontiguousarray(rows)  # np.nonzero returns strided views, which numba would compile anew
    _run(z, rows, shape.split(block), np.float32(gate_cap), np.float32(up_cap), out)
    return out


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def combine(outputs, weights, out):
    """Σ weight · output in rank order: `outputs` float32 [R, k, latent], `weights` float32 [R, k], `out` [R, latent].

    The order is the router's, never that in which reads arrived.
    """
    rows, k, width = outputs.shape
    for r in prange(rows):
        for i in range(width):
            out[r, i] = weights[r, 0] * outputs[r, 0, i]
        for rank in range(1, k):
            for i in range(width):
                out[r, i] += weights[r, rank] * outputs[r, rank, i]
