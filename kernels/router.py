"""The router: sigmoid scores, biased selection, unbiased weights (k3-spec §3.5)."""

import numpy as np
from numba import njit, prange

from kernels.activation import sigmoid32

_LOWEST = np.float32(-3.4e38)  # above the -inf of an expert already chosen, so that a row's ids stay distinct


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _route(logits, bias, scaling, experts, weights):
    rows, n = logits.shape
    k = experts.shape[1]
    for r in prange(rows):
        scores = np.empty(n, np.float32)
        choice = np.empty(n, np.float32)
        total = np.float32(0.0)
        for e in range(n):
            scores[e] = sigmoid32(logits[r, e])
            choice[e] = scores[e] + bias[e]
            if choice[e] != choice[e]:  # NaN: no comparison would choose it, so it spoils the row's weights
                total = np.float32(np.nan)
                choice[e] = _LOWEST
        for rank in range(k):
            best = 0
            for e in range(1, n):
                if choice[e] > choice[best]:  # strictly: a tie stays with the lower id
                    best = e
            experts[r, rank] = best
            weights[r, rank] = scores[best]
            total += scores[best]
            choice[best] = np.float32(-np.inf)
        for rank in range(k):
            weights[r, rank] = weights[r, rank] / (total + np.float32(1e-20)) * scaling


def route(logits: np.ndarray, bias: np.ndarray, top_k: int, scaling: float) -> tuple[np.ndarray, np.ndarray]:
    """Choose `top_k` experts a row: `logits` float32 [R, E], `bias` float32 [E] (selection only).

    Returns expert ids int32 [R, k], in descending selection score (ties to the lower id), and their weights float32
    [R, k]: scores without the bias, normalised to sum `scaling`. NaN logits give NaN weights, which the layer's
    finiteness check reports.
    """
    experts = np.empty((logits.shape[0], top_k), np.int32)
    weights = np.empty((logits.shape[0], top_k), np.float32)
    _route(logits, bias, np.float32(scaling), experts, weights)
    return experts, weights
