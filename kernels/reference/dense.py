"""Definitions of a dense layer and of widening bf16 (k3-spec §2.3)."""

import numpy as np


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """y = x Wᵀ: `x` [R, K], `weight` [N, K] (values, not bf16 bits); returns [R, N]."""
    return x @ weight.T


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bits uint16 as float64: sign, 8 bits of exponent with bias 127, 7 bits of fraction; subnormals, inf, NaN."""
    sign = np.where(bits >> 15 == 1, -1.0, 1.0)
    exponent = (bits >> 7 & 255).astype(np.int64)
    fraction = (bits & 127) / 128
    finite = np.where(exponent == 0, fraction * 2.0**-126, (1 + fraction) * np.exp2(exponent - 127.0))
    return sign * np.where(exponent == 255, np.where(fraction == 0, np.inf, np.nan), finite)
