"""Definitions of Kimi Delta Attention after its projections (k3-spec §3.3), token by token.

Letters: T tokens, H heads, d head_dim (keys and values alike), C channels, J convolution taps.
"""

import numpy as np

from kernels.reference.activation import exp, sigmoid, silu
from kernels.reference.norm import rms_norm


def short_conv(u: np.ndarray, history: np.ndarray, taps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Causal depthwise convolution, then SiLU; returns it [T, C] and the last J-1 inputs [J-1, C].

    `u` [T, C], `history` [J-1, C] the inputs before (oldest first, zeros at the start), `taps` [C, J], the last of
    which is for the current token.
    """
    past = history.shape[0]
    inputs = np.concatenate([history, u])  # [J-1+T, C]
    sums = [np.sum(taps.T * inputs[t : t + past + 1], axis=0) for t in range(u.shape[0])]
    return silu(np.stack(sums)), inputs[u.shape[0] :]


def normalise_heads(x: np.ndarray, scale: float) -> np.ndarray:
    """x / sqrt(Σx² + 1e-6) · scale for each head of `x` [T, H, d]; 1e-6 is added inside the root."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def decay(z: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray, lower_bound: float) -> np.ndarray:
    """α = exp(lower_bound · σ(exp(A_log[h]) · (z + dt_bias))): `z` [T, H, d], `a_log` [≥ H], `dt_bias` [H, d]."""
    a = exp(a_log[: z.shape[1]])[:, None]  # by head: the released tensor is longer than H
    return exp(lower_bound * sigmoid(a * (z + dt_bias)))


def recurrence(
    state: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, alpha: np.ndarray, beta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [T, H, d] and the state after them, from `state` [H, key, value]; q, k, v, alpha [T, H, d], beta [T, H].

    S ← diag(α) S;  S ← S + k (β (v − Sᵀ k))ᵀ;  o = Sᵀ q, which reads the updated state.
    """
    state, out = state.copy(), np.empty_like(v)
    for t in range(k.shape[0]):
        for h in range(k.shape[1]):
            S = alpha[t, h][:, None] * state[h]
            S = S + np.outer(k[t, h], beta[t, h] * (v[t, h] - S.T @ k[t, h]))
            out[t, h] = S.T @ q[t, h]
            state[h] = S
    return out, state


def norm_and_gate(o: np.ndarray, weight: np.ndarray, eps: float, gates: np.ndarray) -> np.ndarray:
    """RMS(o; weight) ⊙ σ(gates) per head: `o`, `gates` [T, H, d], `weight` [d] shared by the heads. Norm first."""
    return rms_norm(o, weight, eps) * sigmoid(gates)
