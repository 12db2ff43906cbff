"""Definitions of the activation functions (k3-spec §3.7), elementwise on any float dtype."""

import numpy as np


def exp(x: np.ndarray) -> np.ndarray:
    """e^x."""
    with np.errstate(over="ignore", under="ignore"):
        return np.exp(x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x)."""
    return 1 / (1 + exp(-x))


def tanh(x: np.ndarray) -> np.ndarray:
    """Hyperbolic tangent."""
    return np.tanh(x)


def silu(x: np.ndarray) -> np.ndarray:
    """x · σ(x)."""
    return x * sigmoid(x)


def situ(gate: np.ndarray, up: np.ndarray, gate_cap: float, up_cap: float) -> np.ndarray:
    """SiTU-GLU: [cap · tanh(g / cap) · σ(g)] · [cap' · tanh(u / cap')]; σ takes the raw gate, not the capped one."""
    return gate_cap * tanh(gate / gate_cap) * sigmoid(gate) * up_cap * tanh(up / up_cap)
