"""Training arithmetic: bfloat16 GEMMs, float32 stream, norms, router and recurrence; compiled pieces.

Same functions as `reference_ops`. Expert dispatch and the chunk scan stay eager: their shapes or loops
would make the compiler unroll or recompile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import kda, mxfp4
from . import reference_ops as ref

SLOT_STEP = 32  # expert capacities are rounded up to this, to keep the number of distinct shapes small


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Return x wᵀ in bfloat16 (accumulated in float32)."""
    return functional.linear(x.bfloat16(), w.bfloat16())


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm, computed in float32, as bfloat16."""
    return _rms(x, weight, eps)


@torch.compile(dynamic=False)
def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ref.rms(x.float(), weight, eps).bfloat16()


@torch.compile(dynamic=False)
def mix_norm(sources: list[Tensor], gamma: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMS(mix(sources)) in bfloat16; sources float32."""
    return ref.mix_norm(sources, gamma, weight, eps).bfloat16()


@torch.compile(dynamic=True)
def situ(gate: Tensor, up: Tensor, gate_cap: float, up_cap: float) -> Tensor:
    """SiTU-GLU in float32, rounded to bfloat16."""
    return ref.situ(gate.float(), up.float(), gate_cap, up_cap).bfloat16()


@torch.compile(dynamic=False)
def _kda_terms(
    projected: tuple[Tensor, ...],
    taps: tuple[Tensor, ...],
    A_log: Tensor,
    dt_bias: Tensor,
    heads: int,
    lower_bound: float,
) -> tuple[Tensor, ...]:
    projected = tuple(p.float() for p in projected)
    return kda.chunk_terms(*ref.kda_inputs(projected, taps, A_log, dt_bias, heads, lower_bound))


def kda_mix(
    projected: tuple[Tensor, ...],
    taps: tuple[Tensor, ...],
    A_log: Tensor,
    dt_bias: Tensor,
    heads: int,
    lower_bound: float,
) -> Tensor:
    """Return the KDA output [B, T, H, K], by chunks."""
    w, u, kt, decay, qg, a_qk = _kda_terms(projected, taps, A_log, dt_bias, heads, lower_bound)
    states, v_new = kda.Scan.apply(w, u, kt, decay)
    return kda.chunk_output(qg, a_qk, states, v_new, projected[0].shape[0])


@torch.compile(dynamic=False)
def gated_norm(o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Return RMS(o) and the sigmoid gate, as bfloat16."""
    return ref.gated_norm(o, weight, gate.float(), eps).bfloat16()


@torch.compile(dynamic=False)
def gate(o: Tensor, gate: Tensor) -> Tensor:
    """Return MLA's output gate, as bfloat16."""
    return ref.gate(o.float(), gate.float()).bfloat16()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of bfloat16 [B, T, H, K] by the fused kernel (float32 softmax)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def route(x: Tensor, weight: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Route in float32."""
    return ref.route(x.float(), weight, bias, top_k)


class Dispatch(torch.autograd.Function):
    """Copy tokens to expert slots; both directions are gathers, as every token fills exactly top_k slots."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        """Return z[token] [slots, latent], an empty slot (token = N) giving zeros."""
        ctx.save_for_backward(slot)
        return torch.cat((z, z.new_zeros(1, z.shape[1]))).index_select(0, token)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        """Sum each token's slots."""
        (slot,) = ctx.saved_tensors
        return d_out.index_select(0, slot.flatten()).view(*slot.shape, -1).sum(1), None, None


class Combine(torch.autograd.Function):
    """Weighted sum of each token's slots."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, weights: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        """Return float32 [N, latent] from slot outputs [slots, latent] and weights [N, top_k]."""
        picked = out.index_select(0, slot.flatten()).view(*slot.shape, -1).float()
        ctx.save_for_backward(picked, weights, token, slot)
        return torch.bmm(weights[:, None], picked)[:, 0]

    @staticmethod
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Scatter by gathering: an empty slot reads a zero row and a zero weight."""
        picked, weights, token, slot = ctx.saved_tensors
        d_weights = torch.bmm(picked, d_sum[..., None])[..., 0]
        slot_weight = weights.new_zeros(token.shape[0]).scatter_(0, slot.flatten(), weights.flatten())
        padded = torch.cat((d_sum, d_sum.new_zeros(1, d_sum.shape[1])))
        d_out = padded.index_select(0, token).mul_(slot_weight[:, None])
        return d_out.bfloat16(), d_weights, None, None


def slots(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, int]:
    """Plan the dispatch: token per slot [E * capacity], slot per choice [N, top_k], and the capacity."""
    flat = ids.flatten()
    load = torch.bincount(flat, minlength=experts)
    capacity = -(-int(load.max()) // SLOT_STEP) * SLOT_STEP
    order = flat.argsort(stable=True)
    rank = torch.arange(flat.shape[0]) - (load.cumsum(0) - load)[flat[order]]
    position = flat[order] * capacity + rank
    slot = torch.empty_like(flat).scatter_(0, order, position)
    token = torch.full((experts * capacity,), ids.shape[0]).scatter_(0, position, order // ids.shape[1])
    return token, slot.view_as(ids), capacity


@torch.compile(dynamic=False)
def fake_quantise(w: Tensor) -> Tensor:
    """Return the MXFP4 values of a master as bfloat16 (exact), gradient straight through."""
    return mxfp4.fake_quantise(w).bfloat16()


def experts(
    z: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, caps: tuple[float, float]
) -> Tensor:
    """Run the chosen experts as padded batches, on weights rounded to MXFP4."""
    token, slot, capacity = slots(ids, w1.shape[0])
    x = Dispatch.apply(z, token, slot).view(w1.shape[0], capacity, -1)
    w1, w2, w3 = fake_quantise(w1), fake_quantise(w2), fake_quantise(w3)
    h = situ(torch.bmm(x, w1.mT), torch.bmm(x, w3.mT), *caps)
    return Combine.apply(torch.bmm(h, w2.mT).flatten(0, 1), weights, token, slot)
