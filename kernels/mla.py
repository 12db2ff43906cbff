"""Absorbed latent attention over a cache of latents (k3-spec §3.4). No rotation is applied to anything.

Keys are taken in blocks of 64 at absolute positions, ascending, with a running maximum: a row's result depends on its
position and the cache, not on the chunk in which it was computed. Parallel over rows and heads, never over keys.
Letters: T rows, H heads, n nope, r rope, v value width, c latent width, P positions.
"""

import numpy as np
from numba import njit, prange

from kernels.activation import exp32
from kernels.dot import dot4_f32, dot_bf16, dot_f32
from kernels.simd import bits_to_f32, fma, vfma, vload, vload_tail, vsplat, vstore, vstore_tail

KEY_BLOCK = 64
_HEADS = 8  # heads that share a block of keys while it is in the cache: 64 keys of 576 are 147 KB


@njit(forceinline=True, error_model="numpy")
def _absorb(q, kv_b, absorbed):
    """absorbed[c] = Σ_n q[n] · UK[n, c], n ascending; UK are the first rows of `kv_b` (bf16 bits)."""
    for c in range(absorbed.shape[0]):
        absorbed[c] = np.float32(0.0)
    for n in range(q.shape[0]):
        for c in range(absorbed.shape[0]):
            absorbed[c] = fma(q[n], bits_to_f32(np.uint32(kv_b[n, c]) << np.uint32(16)), absorbed[c])


@njit(forceinline=True, error_model="numpy")
def _score(query, keys, width, count, scale, scores):
    """scores[s] = scale · query · key s, for `count` keys of `width` float32 at a byte address; returns the largest."""
    fours = count // 4 * 4
    stride = 4 * width
    for s in range(0, fours, 4):
        a, b, c, d = dot4_f32(query, keys + stride * s, stride, width)
        scores[s], scores[s + 1], scores[s + 2], scores[s + 3] = a * scale, b * scale, c * scale, d * scale
    for s in range(fours, count):
        scores[s] = dot_f32(query, keys + stride * s, width) * scale
    top = scores[0]
    for s in range(1, count):
        top = max(top, scores[s])
    return top


@njit(forceinline=True, error_model="numpy")
def _gather(weights, count, keys, width, context):
    """context[c] += Σ_s weights[s] · key s [c], s ascending; 64 columns at a time stay in registers."""
    stride, at = 4 * width, context.ctypes.data
    wide = context.shape[0] // 64 * 64
    for c in range(0, wide, 64):
        here, column = at + 4 * c, keys + 4 * c
        c0, c1, c2, c3 = vload(here), vload(here + 64), vload(here + 128), vload(here + 192)
        for s in range(count):
            p, row = vsplat(weights[s]), column + stride * s
            c0, c1 = vfma(p, vload(row), c0), vfma(p, vload(row + 64), c1)
            c2, c3 = vfma(p, vload(row + 128), c2), vfma(p, vload(row + 192), c3)
        vstore(here, c0)
        vstore(here + 64, c1)
        vstore(here + 128, c2)
        vstore(here + 192, c3)
    for c in range(wide, context.shape[0], 16):
        count_c = min(16, context.shape[0] - c)
        total = vload_tail(at + 4 * c, count_c)
        for s in range(count):
            total = vfma(vsplat(weights[s]), vload_tail(keys + stride * s + 4 * c, count_c), total)
        vstore_tail(at + 4 * c, total, count_c)


@njit(forceinline=True, error_model="numpy")
def _attend_block(query, keys, count, scale, scores, running, context):
    """Take one block of keys into a head's running softmax: `running` holds its maximum and its sum."""
    width = query.shape[0]
    top = max(running[0], _score(query.ctypes.data, keys, width, count, scale, scores))
    rescale = exp32(running[0] - top)
    total = running[1] * rescale
    for c in range(context.shape[0]):
        context[c] *= rescale
    for s in range(count):
        scores[s] = exp32(scores[s] - top)
        total += scores[s]
    _gather(scores, count, keys, width, context)
    running[0], running[1] = top, total


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def attention(q, kv_b, cache, start, scale, out):
    """Causal attention of T rows at positions start .. start+T-1.

    `q` float32 [T, H, n + r], `kv_b` bf16 bits uint16 [H, n + v, c], `cache` float32 [P, c + r] C-contiguous with the
    rows' own entries already written, `out` float32 [T, H, v].
    """
    rows, heads, q_width = q.shape
    v_width, latent = out.shape[2], kv_b.shape[2]
    nope, width = kv_b.shape[1] - v_width, cache.shape[1]
    groups = (heads + _HEADS - 1) // _HEADS
    for index in prange(rows * groups):
        t, first_head = index // groups, index % groups * _HEADS
        count = min(_HEADS, heads - first_head)
        queries = np.empty((count, latent + q_width - nope), np.float32)
        contexts = np.zeros((count, latent), np.float32)
        running = np.zeros((count, 2), np.float32)
        scores = np.empty(KEY_BLOCK, np.float32)
        for g in range(count):
            h = first_head + g
            _absorb(q[t, h, :nope], kv_b[h], queries[g, :latent])
            queries[g, latent:] = q[t, h, nope:]
            running[g, 0] = -np.inf
        positions = start + t + 1
        for first in range(0, positions, KEY_BLOCK):
            keys = cache.ctypes.data + 4 * width * first
            for g in range(count):
                size = min(KEY_BLOCK, positions - first)
                _attend_block(queries[g], keys, size, scale, scores, running[g], contexts[g])
        for g in range(count):
            h = first_head + g
            for c in range(latent):
                contexts[g, c] /= running[g, 1]
            values_at = kv_b.ctypes.data + 2 * latent * (h * kv_b.shape[1] + nope)
            for i in range(v_width):
                out[t, h, i] = dot_bf16(contexts[g].ctypes.data, values_at + 2 * latent * i, latent)
