"""Absorbed latent attention over a cache of latents (k3-spec §3.4). No rotation is applied to anything.

Keys are taken in blocks of 64 at absolute positions, ascending, with a running maximum: a row's result depends on its
position and the cache, not on the chunk in which it was computed. Parallel over (row, head), never over keys.
Letters: T rows, H heads, n nope, r rope, v value width, c latent width, P positions.
"""

import numpy as np
from numba import njit, prange

from kernels.activation import exp32
from kernels.dot import dot_bf16, dot_f32
from kernels.simd import bits_to_f32, fma

KEY_BLOCK = 64


@njit(inline="always")
def _absorb(q, kv_b, absorbed):
    """absorbed[c] = Σ_n q[n] · UK[n, c], n ascending; UK are the first rows of `kv_b` (bf16 bits)."""
    for c in range(absorbed.shape[0]):
        absorbed[c] = np.float32(0.0)
    for n in range(q.shape[0]):
        for c in range(absorbed.shape[0]):
            absorbed[c] = fma(q[n], bits_to_f32(np.uint32(kv_b[n, c]) << np.uint32(16)), absorbed[c])


@njit(inline="always")
def _attend(query, cache, positions, scale, context):
    """Softmax attention of one query [c + r] over cache rows 0..positions-1; context [c] gets Σ p · latent."""
    width, latent = query.shape[0], context.shape[0]
    scores = np.empty(KEY_BLOCK, np.float32)
    query_at, cache_at = query.ctypes.data, cache.ctypes.data
    top, total = np.float32(-np.inf), np.float32(0.0)
    for c in range(latent):
        context[c] = np.float32(0.0)
    for first in range(0, positions, KEY_BLOCK):
        count = min(KEY_BLOCK, positions - first)
        block_top = top
        for s in range(count):
            scores[s] = dot_f32(query_at, cache_at + 4 * width * (first + s), width) * scale
            block_top = max(block_top, scores[s])
        rescale = exp32(top - block_top)
        total *= rescale
        for c in range(latent):
            context[c] *= rescale
        for s in range(count):
            p = exp32(scores[s] - block_top)
            total += p
            for c in range(latent):
                context[c] = fma(p, cache[first + s, c], context[c])
        top = block_top
    for c in range(latent):
        context[c] /= total


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def attention(q, kv_b, cache, start, scale, out):
    """Causal attention of T rows at positions start .. start+T-1.

    `q` float32 [T, H, n + r], `kv_b` bf16 bits uint16 [H, n + v, c], `cache` float32 [P, c + r] C-contiguous with the
    rows' own entries already written, `out` float32 [T, H, v].
    """
    rows, heads, q_width = q.shape
    v_width, latent = out.shape[2], kv_b.shape[2]
    nope = kv_b.shape[1] - v_width
    for index in prange(rows * heads):
        t, h = index // heads, index % heads
        query = np.empty(latent + q_width - nope, np.float32)
        context = np.empty(latent, np.float32)
        _absorb(q[t, h, :nope], kv_b[h], query[:latent])
        query[latent:] = q[t, h, nope:]
        _attend(query, cache, start + t + 1, scale, context)
        values_at = kv_b.ctypes.data + 2 * latent * (h * kv_b.shape[1] + nope)
        for i in range(v_width):
            out[t, h, i] = dot_bf16(context.ctypes.data, values_at + 2 * latent * i, latent)
