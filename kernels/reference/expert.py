"""Definition of one routed expert and of their weighted sum (k3-spec §3.6)."""

import numpy as np

from kernels.reference.activation import situ


def expert_mlp(
    z: np.ndarray, w1: np.ndarray, w2: np.ndarray, w3: np.ndarray, gate_cap: float, up_cap: float
) -> np.ndarray:
    """W2 · situ(W1 z, W3 z): `z` [M, latent], `w1`, `w3` [intermediate, latent], `w2` [latent, intermediate]."""
    return situ(z @ w1.T, z @ w3.T, gate_cap, up_cap) @ w2.T


def combine(outputs: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Σ weight · output over a token's experts: `outputs` [R, k, latent], `weights` [R, k]; returns [R, latent]."""
    return np.sum(weights[:, :, None] * outputs, axis=1)
