"""The model's arithmetic by definition: plain torch, in whatever dtype the weights have.

`fast_ops` implements the same functions for training; `python -m bench.nano.train --check` compares them.
Letters: B rows, T tokens, D hidden, H heads, K head width, E experts, N = B * T.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from . import kda

L2_EPS = 1e-6


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Return x wᵀ."""
    return functional.linear(x, w)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm over the last axis, eps inside the root."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def mix(sources: list[Tensor], gamma: Tensor, eps: float) -> Tensor:
    """AttnRes: softmax mix over block snapshots and running sum (last), each [B, T, D]; raw values mixed."""
    if len(sources) == 1:
        return sources[0]
    stacked = torch.stack(sources, 2)  # [B, T, n, D]
    scores = (stacked * gamma).sum(-1) * torch.rsqrt(stacked.square().mean(-1) + eps)
    return (scores.softmax(-1)[..., None] * stacked).sum(2)


def mix_norm(sources: list[Tensor], gamma: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMS(mix(sources)): the input of every sublayer and of the head."""
    return rms(mix(sources, gamma, eps), weight, eps)


def situ(gate: Tensor, up: Tensor, gate_cap: float, up_cap: float) -> Tensor:
    """SiTU-GLU: both branches softly capped, the sigmoid on the raw gate."""
    return gate_cap * torch.tanh(gate / gate_cap) * torch.sigmoid(gate) * up_cap * torch.tanh(up / up_cap)


def short_conv(u: Tensor, taps: Tensor) -> Tensor:
    """Causal depthwise convolution of u [B, T, C] by taps [C, 1, k], last tap current, then SiLU."""
    kernel = taps.shape[-1]
    padded = functional.pad(u, (0, 0, kernel - 1, 0))
    out = padded[:, : u.shape[1]] * taps[:, 0, 0]
    for j in range(1, kernel):
        out = out + padded[:, j : j + u.shape[1]] * taps[:, 0, j]
    return functional.silu(out)


def kda_inputs(
    projected: tuple[Tensor, ...],
    taps: tuple[Tensor, ...],
    A_log: Tensor,
    dt_bias: Tensor,
    heads: int,
    lower_bound: float,
) -> tuple[Tensor, ...]:
    """Turn q, k, v, z [B, T, H*K] and b [B, T, H] projections into the recurrence's q, k, v, g, beta."""
    q, k, v = (short_conv(u, w).unflatten(-1, (heads, -1)) for u, w in zip(projected[:3], taps, strict=True))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
    z = (projected[3] + dt_bias).unflatten(-1, (heads, -1))
    g = lower_bound * torch.sigmoid(A_log[:heads].exp()[:, None] * z)  # A_log is per head, stored padded
    return q, k, v, g, torch.sigmoid(projected[4])


def kda_mix(
    projected: tuple[Tensor, ...],
    taps: tuple[Tensor, ...],
    A_log: Tensor,
    dt_bias: Tensor,
    heads: int,
    lower_bound: float,
) -> Tensor:
    """Return the KDA output o [B, T, H, K] of the projections (see `kda_inputs`)."""
    return kda.recurrent(*kda_inputs(projected, taps, A_log, dt_bias, heads, lower_bound))


def gated_norm(o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Return RMS(o) per head, then the sigmoid gate: [B, T, H*K]."""
    return rms(o, weight, eps).flatten(-2) * torch.sigmoid(gate)


def gate(o: Tensor, gate: Tensor) -> Tensor:
    """Return MLA's output gate, no norm: [B, T, H*V]."""
    return o.flatten(-2) * torch.sigmoid(gate)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention of [B, T, H, K]; scale 1/sqrt(K) with K = nope + rope."""
    T = q.shape[1]
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def route(x: Tensor, weight: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return expert ids and weights [N, top_k]; the bias takes part in the choice only."""
    scores = torch.sigmoid(functional.linear(x, weight))
    ids = torch.topk(scores + bias, top_k, -1).indices
    chosen = scores.gather(-1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


def experts(
    z: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, caps: tuple[float, float]
) -> Tensor:
    """Return the weighted sum of the chosen experts of z [N, latent]; w1, w3 [E, I, latent], w2 transposed."""
    out = torch.zeros_like(z)
    for e in range(w1.shape[0]):
        token, rank = (ids == e).nonzero(as_tuple=True)
        h = situ(functional.linear(z[token], w1[e]), functional.linear(z[token], w3[e]), *caps)
        out.index_add_(0, token, functional.linear(h, w2[e]) * weights[token, rank][:, None])
    return out
