"""Definition of the RMS norm (k3-spec §3.0)."""

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x²) + eps) · w along the last axis: `x` [..., N], `weight` [N]; eps is inside the root."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
