"""Kimi Delta Attention's recurrence: per-token definition and the chunked, differentiable equivalent.

Shapes: q, k, v, g are [B, T, H, D], beta [B, T, H]; q and k already normalised and q scaled; g is the
log decay in [-5, 0]. C = CHUNK tokens per chunk, N chunks, X = B * H independent states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 16  # at g >= -5 the exponents stay within +-40 of the chunk's middle, safe in float32


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Apply the recurrence token by token from a zero state; return outputs [B, T, H, D]."""
    B, T, H, D = q.shape
    state = q.new_zeros(B, H, D, v.shape[-1])  # [B, H, key, value]
    outputs = []
    for t in range(T):
        state = state * g[:, t].exp()[..., None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1)


def chunk_terms(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Return what the scan needs: w, u, kt [N, X, C, D], decay [N, X, D], and qg, a_qk for the output.

    Inside a chunk the delta rule is the triangular system (I + A) v_new = beta (v - (k e^G) S).
    """

    def chunks(x: Tensor) -> Tensor:
        B, T, H, D = x.shape
        return x.view(B, T // CHUNK, CHUNK, H, D).permute(1, 0, 3, 2, 4).reshape(T // CHUNK, B * H, CHUNK, D)

    q, k, v, g, beta = (chunks(x) for x in (q, k, v, g, beta[..., None]))
    lower = torch.ones(CHUNK, CHUNK, dtype=q.dtype).tril()
    G = torch.matmul(lower, g)  # inclusive cumulative log decay, [N, X, C, D]
    centred = G - G[:, :, CHUNK // 2 : CHUNK // 2 + 1]
    grow, shrink = centred.exp(), (-centred).exp()
    k_shrink = k * shrink
    A = torch.matmul(k * grow, k_shrink.mT) * beta * lower.tril(-1)
    a_qk = torch.matmul(q * grow, k_shrink.mT) * lower
    eG = G.exp()
    inverse = unit_lower_inverse(A)
    w = torch.matmul(inverse, beta * k * eG)
    u = torch.matmul(inverse, beta * v)
    last = G[:, :, -1:]
    return w, u, k * (last - G).exp(), last[:, :, 0].exp(), q * eG, a_qk


def unit_lower_inverse(A: Tensor) -> Tensor:
    """Return (I + A)^-1 for strictly lower A [..., C, C]; exact by doubling, as A^CHUNK = 0."""
    eye = torch.eye(CHUNK, dtype=A.dtype)
    A2 = torch.matmul(A, A)
    A4 = torch.matmul(A2, A2)
    A8 = torch.matmul(A4, A4)
    return torch.matmul(torch.matmul(eye - A, eye + A2), torch.matmul(eye + A4, eye + A8))


class Scan(torch.autograd.Function):
    """States entering each chunk and the chunks' new values, with a hand-written reverse scan."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, u: Tensor, kt: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        """Return states [N, X, D, Dv] (before each chunk) and v_new [N, X, C, Dv]."""
        N, X, _, D = w.shape
        states = w.new_empty(N, X, D, u.shape[-1])
        v_new = torch.empty_like(u)
        state = w.new_zeros(X, D, u.shape[-1])
        for n in range(N):
            states[n] = state
            torch.baddbmm(u[n], w[n], state, alpha=-1, out=v_new[n])
            state = torch.baddbmm(state * decay[n][..., None], kt[n].mT, v_new[n])
        ctx.save_for_backward(w, kt, decay, states, v_new)
        return states, v_new

    @staticmethod
    def backward(ctx: Any, d_states: Tensor, d_v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Reverse scan; every gradient that is linear in saved values is batched outside the loop."""
        w, kt, decay, states, v_new = ctx.saved_tensors
        carries = torch.empty_like(states)  # gradient of the state leaving each chunk
        d_values = torch.empty_like(v_new)
        carry = torch.zeros_like(states[0])
        for n in range(w.shape[0] - 1, -1, -1):
            carries[n] = carry
            torch.baddbmm(d_v[n], kt[n], carry, out=d_values[n])
            carry = torch.baddbmm(d_states[n] + carry * decay[n][..., None], w[n].mT, d_values[n], alpha=-1)
        d_w = -torch.matmul(d_values, states.mT)
        d_kt = torch.matmul(v_new, carries.mT)
        return d_w, d_values, d_kt, (states * carries).sum(-1)


def chunk_output(qg: Tensor, a_qk: Tensor, states: Tensor, v_new: Tensor, batch: int) -> Tensor:
    """Read every token's output from the entering state and the chunk's own values: [B, T, H, D]."""
    o = torch.matmul(qg, states) + torch.matmul(a_qk, v_new)  # [N, X, C, D]
    N, X, C, D = o.shape
    return o.view(N, batch, X // batch, C, D).permute(1, 0, 3, 2, 4).reshape(batch, N * C, X // batch, D)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Equal `recurrent` for T a multiple of CHUNK, in float32 and differentiable."""
    w, u, kt, decay, qg, a_qk = chunk_terms(q, k, v, g, beta)
    states, v_new = Scan.apply(w, u, kt, decay)
    return chunk_output(qg, a_qk, states, v_new, q.shape[0])
