"""Definition of latent attention (k3-spec §3.4), *not* absorbed: keys and values are built and attended to plainly.

Letters: T rows, H heads, n nope, r rope (no rotation is applied), v value width, c latent width, P positions.
"""

import numpy as np


def attention(q: np.ndarray, kv_b: np.ndarray, cache: np.ndarray, start: int, scale: float) -> np.ndarray:
    """Causal attention of rows at positions start .. start+T-1; returns [T, H, v].

    `q` [T, H, n + r], `kv_b` [H, n + v, c] (first the rows that make keys, then those that make values), `cache`
    [P, c + r]: per position the latent, then the key part that all heads share.
    """
    rope = cache.shape[1] - kv_b.shape[2]
    nope = q.shape[2] - rope
    latents, shared = cache[:, : kv_b.shape[2]], cache[:, kv_b.shape[2] :]  # [P, c], [P, r]
    out = np.empty((*q.shape[:2], kv_b.shape[1] - nope), q.dtype)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            seen = slice(0, start + t + 1)
            keys = latents[seen] @ kv_b[h, :nope].T  # [P, n]
            values = latents[seen] @ kv_b[h, nope:].T  # [P, v]
            scores = (keys @ q[t, h, :nope] + shared[seen] @ q[t, h, nope:]) * scale
            powers = np.exp(scores - scores.max())
            out[t, h] = (powers / powers.sum()) @ values
    return out
