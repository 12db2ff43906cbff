"""The gated delta rule: the recurrence of KDA, token by token (k3-spec §3.3 step 6).

    S ← diag(α) S;  S ← S + k (β (v − Sᵀ k))ᵀ;  o = Sᵀ q

Parallel over heads, never over tokens, and a column of S is touched by its own operations alone: keys ascending, fused
where written. So a prompt read in chunks of any size, a journal applied later, and any width of column block give the
same bits. Columns are taken 64 at a time, which with 128 keys is 32 KB: one trip to memory for all tokens of a call.
Letters: T tokens, H heads, d head_dim (keys and values alike).
"""

import numpy as np
from numba import njit, prange

from kernels.simd import vfma, vload, vload_tail, vmul, vsplat, vstore, vstore_tail, vsub, vzero

_BLOCK = 64  # columns: four vectors, so that four chains of additions run side by side


@njit(forceinline=True, error_model="numpy")
def _recall(s, stride, k, alpha, store):
    """r = Σ_i k_i (α_i S_i) of 64 columns at byte address `s`; S ← diag(α) S when `store`."""
    r0, r1, r2, r3 = vzero(), vzero(), vzero(), vzero()
    for i in range(k.shape[0]):
        row, key, decay = s + stride * i, vsplat(k[i]), vsplat(alpha[i])
        s0, s1 = vmul(decay, vload(row)), vmul(decay, vload(row + 64))
        s2, s3 = vmul(decay, vload(row + 128)), vmul(decay, vload(row + 192))
        if store:
            vstore(row, s0)
            vstore(row + 64, s1)
            vstore(row + 128, s2)
            vstore(row + 192, s3)
        r0, r1, r2, r3 = vfma(key, s0, r0), vfma(key, s1, r1), vfma(key, s2, r2), vfma(key, s3, r3)
    return r0, r1, r2, r3


@njit(forceinline=True, error_model="numpy")
def _write(s, stride, k, v, beta, r0, r1, r2, r3):
    """S ← S + k (β (v − r))ᵀ of 64 columns that are decayed already; `v` is a byte address."""
    strength = vsplat(beta)
    d0, d1 = vmul(strength, vsub(vload(v), r0)), vmul(strength, vsub(vload(v + 64), r1))
    d2, d3 = vmul(strength, vsub(vload(v + 128), r2)), vmul(strength, vsub(vload(v + 192), r3))
    for i in range(k.shape[0]):
        row, key = s + stride * i, vsplat(k[i])
        vstore(row, vfma(key, d0, vload(row)))
        vstore(row + 64, vfma(key, d1, vload(row + 64)))
        vstore(row + 128, vfma(key, d2, vload(row + 128)))
        vstore(row + 192, vfma(key, d3, vload(row + 192)))


@njit(forceinline=True, error_model="numpy")
def _read(s, stride, q, k, v, alpha, beta, r0, r1, r2, r3, o, store):
    """o = Σ_i q_i S_i of 64 updated columns; with `store` they are decayed in memory already and are updated there."""
    strength = vsplat(beta)
    d0, d1 = vmul(strength, vsub(vload(v), r0)), vmul(strength, vsub(vload(v + 64), r1))
    d2, d3 = vmul(strength, vsub(vload(v + 128), r2)), vmul(strength, vsub(vload(v + 192), r3))
    o0, o1, o2, o3 = vzero(), vzero(), vzero(), vzero()
    for i in range(k.shape[0]):
        row, key, query = s + stride * i, vsplat(k[i]), vsplat(q[i])
        s0, s1, s2, s3 = vload(row), vload(row + 64), vload(row + 128), vload(row + 192)
        if not store:
            decay = vsplat(alpha[i])
            s0, s1, s2, s3 = vmul(decay, s0), vmul(decay, s1), vmul(decay, s2), vmul(decay, s3)
        s0, s1, s2, s3 = vfma(key, d0, s0), vfma(key, d1, s1), vfma(key, d2, s2), vfma(key, d3, s3)
        if store:
            vstore(row, s0)
            vstore(row + 64, s1)
            vstore(row + 128, s2)
            vstore(row + 192, s3)
        o0, o1, o2, o3 = vfma(query, s0, o0), vfma(query, s1, o1), vfma(query, s2, o2), vfma(query, s3, o3)
    vstore(o, o0)
    vstore(o + 64, o1)
    vstore(o + 128, o2)
    vstore(o + 192, o3)


@njit(forceinline=True, error_model="numpy")
def _narrow(s, stride, width, q, k, v, alpha, beta, o, store):
    """One token on `width` ≤ 16 columns: the same operations on one vector, its absent lanes zero."""
    r = vzero()
    for i in range(k.shape[0]):
        r = vfma(vsplat(k[i]), vmul(vsplat(alpha[i]), vload_tail(s + stride * i, width)), r)
    delta = vmul(vsplat(beta), vsub(vload_tail(v, width), r))
    out = vzero()
    for i in range(k.shape[0]):
        row = s + stride * i
        updated = vfma(vsplat(k[i]), delta, vmul(vsplat(alpha[i]), vload_tail(row, width)))
        if store:
            vstore_tail(row, updated, width)
        out = vfma(vsplat(q[i]), updated, out)
    if o:
        vstore_tail(o, out, width)


@njit(forceinline=True, error_model="numpy")
def _apply(s, d, first, k, v, alpha, beta):
    """Advance columns first .. of a head's state at byte address `s` by one token."""
    stride, at = 4 * d, s + 4 * first
    if first + _BLOCK <= d:
        r0, r1, r2, r3 = _recall(at, stride, k, alpha, True)
        _write(at, stride, k, v.ctypes.data + 4 * first, beta, r0, r1, r2, r3)
    else:
        for column in range(first, d, 16):
            x = 4 * column
            _narrow(s + x, stride, min(16, d - column), k, k, v.ctypes.data + x, alpha, beta, 0, True)


@njit(forceinline=True, error_model="numpy")
def _output(s, d, first, q, k, v, alpha, beta, out, store):
    """Output of one token for columns first .. of a head's state, which is advanced only when `store`."""
    stride, at, x = 4 * d, s + 4 * first, 4 * first
    if first + _BLOCK <= d:
        r0, r1, r2, r3 = _recall(at, stride, k, alpha, store)
        _read(at, stride, q, k, v.ctypes.data + x, alpha, beta, r0, r1, r2, r3, out.ctypes.data + x, store)
    else:
        for column in range(first, d, 16):
            x = 4 * column
            width = min(16, d - column)
            _narrow(s + x, stride, width, q, k, v.ctypes.data + x, alpha, beta, out.ctypes.data + x, store)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def advance(state, done_k, done_v, done_alpha, done_beta, q, k, v, alpha, beta, out, next_state):
    """Apply a journal to a state, then compute the outputs of T more tokens without changing it.

    `state` float32 [H, d, d] (key, value) is advanced by the journal: done_k, done_v, done_alpha [J, H, d], done_beta
    [J, H]; J may be 0. q, k, v, alpha, out float32 [T, H, d], beta [T, H]; T may be 0. The state after the last token
    goes to `next_state`, unless that has no heads: then a step of one token stores nothing, a longer one works on a
    scratch copy.
    """
    heads, d = state.shape[0], state.shape[1]
    tokens = q.shape[0]
    keep = next_state.shape[0] == heads
    for h in prange(heads):
        scratch = next_state[h] if keep else np.empty((d if tokens > 1 else 0, d), np.float32)
        s = state[h].ctypes.data
        for first in range(0, d, _BLOCK):
            for t in range(done_k.shape[0]):
                _apply(s, d, first, done_k[t, h], done_v[t, h], done_alpha[t, h], done_beta[t, h])
            if tokens == 1 and not keep:
                _output(s, d, first, q[0, h], k[0, h], v[0, h], alpha[0, h], beta[0, h], out[0, h], False)
            elif tokens > 0:
                last = min(first + _BLOCK, d)
                scratch[:, first:last] = state[h, :, first:last]
                work = scratch.ctypes.data
                for t in range(tokens):
                    _output(work, d, first, q[t, h], k[t, h], v[t, h], alpha[t, h], beta[t, h], out[t, h], True)
