"""Definition of the router (k3-spec §3.5)."""

import numpy as np

from kernels.reference.activation import sigmoid


def route(logits: np.ndarray, bias: np.ndarray, top_k: int, scaling: float) -> tuple[np.ndarray, np.ndarray]:
    """Ids [R, k] of the `top_k` largest σ(logits) + bias, descending, ties to the lower id, and their weights [R, k].

    `logits` [R, E], `bias` [E]. Weights are the scores *without* the bias, normalised to sum `scaling`.
    """
    scores = sigmoid(logits)
    experts = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(scores, experts, axis=-1)
    return experts, chosen / (chosen.sum(axis=-1, keepdims=True) + 1e-20) * scaling
