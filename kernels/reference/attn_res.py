"""Definition of the Attention Residuals mix (k3-spec §3.2)."""

import numpy as np


def mix(sources: np.ndarray, gamma: np.ndarray, eps: float) -> np.ndarray:
    """Σ p_i s_i: `sources` [S, R, D] (snapshots in order, the running sum last), `gamma` [D]; returns [R, D].

    p = softmax over the sources of Σ_d γ_d s_i[d] / sqrt(mean(s_i²) + eps). The sources are mixed as they are, not
    normalised.
    """
    rms = np.sqrt(np.mean(sources * sources, axis=-1) + eps)  # [S, R]
    scores = np.sum(gamma * sources, axis=-1) / rms  # [S, R]
    powers = np.exp(scores - scores.max(axis=0))
    p = powers / powers.sum(axis=0)
    return np.sum(p[:, :, None] * sources, axis=0)
