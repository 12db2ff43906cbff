"""Kimi Delta Attention before and after its recurrence (`kernels.delta_rule`): convolution, gates, norm (k3-spec §3.3).

Letters: T tokens, H heads, d head_dim (keys and values alike).
"""

import numpy as np
from numba import njit, prange

from kernels.activation import exp32, sigmoid32, silu32
from kernels.dot import dot_f32
from kernels.simd import fma

_L2_EPS = np.float32(1e-6)  # k3-spec §3.3 step 3


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def short_conv(recent, taps, out):
    """Causal depthwise convolution, then SiLU.

    `recent` float32 [J-1+T, C] are the inputs, the J-1 before the first token in front; `taps` float32 [C, J], the last
    for the current token; `out` float32 [T, C].
    """
    tokens, channels = out.shape
    for c in prange(channels):
        for t in range(tokens):
            total = np.float32(0.0)
            for j in range(taps.shape[1]):
                total = fma(taps[c, j], recent[t + j, c], total)
            out[t, c] = silu32(total)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def normalise_heads(x, scale):
    """Divide each head of `x` float32 [T, H, d] by sqrt(Σx² + 1e-6) and multiply it by `scale`, in place."""
    tokens, heads, d = x.shape
    for t in prange(tokens):
        for h in range(heads):
            at = x.ctypes.data + 4 * d * (t * heads + h)
            factor = scale / np.sqrt(dot_f32(at, at, d) + _L2_EPS)
            for i in range(d):
                x[t, h, i] *= factor


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def decay(z, a, dt_bias, lower_bound, alpha):
    """α = exp(lower_bound · σ(a[h] (z + dt_bias))), a = exp(A_log): z, alpha float32 [T, H, d], dt_bias [H, d]."""
    tokens, heads, d = z.shape
    for t in prange(tokens):
        for h in range(heads):
            for i in range(d):
                alpha[t, h, i] = exp32(lower_bound * sigmoid32(a[h] * (z[t, h, i] + dt_bias[h, i])))


@njit(nogil=True, cache=True, error_model="numpy")
def sigmoid_rows(x, out):
    """σ of float32 [T, H] into `out`: the write strength β."""
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            out[t, h] = sigmoid32(x[t, h])


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def norm_and_gate(o, weight, eps, gates):
    """o ← RMS(o; weight) ⊙ σ(gates) per head, in place: `o`, `gates` float32 [T, H, d], `weight` [d]. Norm first."""
    tokens, heads, d = o.shape
    for t in prange(tokens):
        for h in range(heads):
            at = o.ctypes.data + 4 * d * (t * heads + h)
            scale = np.float32(1.0) / np.sqrt(dot_f32(at, at, d) / np.float32(d) + eps)
            for i in range(d):
                o[t, h, i] = o[t, h, i] * scale * weight[i] * sigmoid32(gates[t, h, i])
