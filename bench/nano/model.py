"""Kimi K3's text model in torch, at any size: the trainer's forward and an oracle for the engine.

Parameters carry the released names without the `language_model.` prefix, except that the experts of a
layer are stacked. Arithmetic lives in an `ops` module: `reference_ops` (default, exact by definition) or
`fast_ops` (bfloat16 GEMMs, training). Knows nothing about tokens' text or about sequences' state: one
forward sees whole rows from position 0.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn

from . import reference_ops
from .architecture import Architecture


class Weight(nn.Module):
    """One tensor under the released suffix `.weight`."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


class KDA(nn.Module):
    """Kimi Delta Attention: short convolutions, L2-normed q and k, per-channel decay, gated output."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a, width = a, a.kda_heads * a.kda_dim
        for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
            setattr(self, name, Weight(width, a.hidden))
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            setattr(self, name, Weight(width, 1, a.conv))
        self.f_a_proj, self.f_b_proj = Weight(a.kda_dim, a.hidden), Weight(width, a.kda_dim)
        self.b_proj = Weight(a.kda_heads, a.hidden)
        self.A_log = nn.Parameter(torch.zeros(a.kda_dim))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.o_norm, self.o_proj = Weight(a.kda_dim), Weight(a.hidden, width)

    def forward(self, x: Tensor, ops: ModuleType) -> Tensor:
        """Return [B, T, D]."""
        q, k, v = (ops.linear(x, p.weight) for p in (self.q_proj, self.k_proj, self.v_proj))
        z = ops.linear(ops.linear(x, self.f_a_proj.weight), self.f_b_proj.weight)
        projected = (q, k, v, z, ops.linear(x, self.b_proj.weight))
        taps = (self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)
        o = ops.kda_mix(projected, taps, self.A_log, self.dt_bias, self.a.kda_heads, self.a.gate_lower_bound)
        y = ops.gated_norm(o, self.o_norm.weight, ops.linear(x, self.g_proj.weight), self.a.eps)
        return ops.linear(y, self.o_proj.weight)


class MLA(nn.Module):
    """Gated multi-head latent attention without positions; the `rope` dims are never rotated."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a, heads = a, a.mla_heads
        self.q_a_proj, self.q_a_layernorm = Weight(a.q_lora, a.hidden), Weight(a.q_lora)
        self.q_b_proj = Weight(heads * (a.nope + a.rope), a.q_lora)
        self.kv_a_proj_with_mqa = Weight(a.kv_lora + a.rope, a.hidden)
        self.kv_a_layernorm = Weight(a.kv_lora)
        self.kv_b_proj = Weight(heads * (a.nope + a.v_dim), a.kv_lora)
        self.g_proj, self.o_proj = Weight(heads * a.v_dim, a.hidden), Weight(a.hidden, heads * a.v_dim)

    def forward(self, x: Tensor, ops: ModuleType) -> Tensor:
        """Return [B, T, D]."""
        a = self.a
        q = ops.linear(x, self.q_a_proj.weight)
        q = ops.linear(ops.rms(q, self.q_a_layernorm.weight, a.latent_eps), self.q_b_proj.weight)
        q = q.unflatten(-1, (a.mla_heads, -1))
        latent, k_rope = ops.linear(x, self.kv_a_proj_with_mqa.weight).split((a.kv_lora, a.rope), -1)
        latent = ops.rms(latent, self.kv_a_layernorm.weight, a.latent_eps)
        kv = ops.linear(latent, self.kv_b_proj.weight).unflatten(-1, (a.mla_heads, -1))
        k_nope, v = kv.split((a.nope, a.v_dim), -1)
        k_rope = k_rope[:, :, None].expand(*k_nope.shape[:3], -1)  # one shared key part for all heads
        o = ops.attention(q, torch.cat((k_nope, k_rope), -1), v)
        return ops.linear(ops.gate(o, ops.linear(x, self.g_proj.weight)), self.o_proj.weight)


class MLP(nn.Module):
    """SiTU-GLU MLP: layer 0, and the fused shared experts."""

    def __init__(self, a: Architecture, width: int) -> None:
        super().__init__()
        self.caps = (a.gate_cap, a.up_cap)
        self.gate_proj, self.up_proj = Weight(width, a.hidden), Weight(width, a.hidden)
        self.down_proj = Weight(a.hidden, width)

    def forward(self, x: Tensor, ops: ModuleType) -> Tensor:
        """Return [..., D]."""
        h = ops.situ(ops.linear(x, self.gate_proj.weight), ops.linear(x, self.up_proj.weight), *self.caps)
        return ops.linear(h, self.down_proj.weight)


class Gate(nn.Module):
    """Router weight and selection bias; `load` [E] counts the tokens of the last training forward."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(a.experts, a.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(a.experts))
        self.load = torch.zeros(a.experts)


class Experts(nn.Module):
    """The routed experts' masters, stacked: w1, w3 [E, I, latent], w2 [E, latent, I]."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.ones(a.experts, a.expert, a.latent))
        self.w2 = nn.Parameter(torch.ones(a.experts, a.latent, a.expert))
        self.w3 = nn.Parameter(torch.ones(a.experts, a.expert, a.latent))


class LatentMoE(nn.Module):
    """Experts at latent width with one norm on their sum, plus the shared experts at full width."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.gate, self.experts = Gate(a), Experts(a)
        self.routed_expert_down_proj = Weight(a.latent, a.hidden)
        self.routed_expert_up_proj = Weight(a.hidden, a.latent)
        self.routed_expert_norm = Weight(a.latent)
        self.shared_experts = MLP(a, a.shared * a.expert)
        self.shared_drop = 0.0

    def forward(self, x: Tensor, ops: ModuleType) -> Tensor:
        """Return [B, T, D]; in training, drop the shared output of some tokens (inverted dropout)."""
        flat, e, a = x.flatten(0, 1), self.experts, self.a
        ids, weights = ops.route(flat, self.gate.weight, self.gate.e_score_correction_bias, a.top_k)
        z = ops.linear(flat, self.routed_expert_down_proj.weight)
        u = ops.experts(z, ids, weights, e.w1, e.w2, e.w3, (a.gate_cap, a.up_cap))
        u = ops.rms(u, self.routed_expert_norm.weight, a.eps)
        routed = ops.linear(u, self.routed_expert_up_proj.weight).view_as(x)
        shared = self.shared_experts(x, ops)
        if self.training:
            self.gate.load = torch.bincount(ids.flatten(), minlength=a.experts)
            if self.shared_drop > 0:
                # Without it the shared path learns first and the routed experts stay ornamental.
                keep = torch.rand(x.shape[:2]) >= self.shared_drop
                shared = shared * (keep / (1 - self.shared_drop))[..., None].to(shared.dtype)
        return routed + shared


class Layer(nn.Module):
    """One decoder layer; its parent owns the snapshots and the running sum."""

    def __init__(self, a: Architecture, index: int) -> None:
        super().__init__()
        self.a, self.index = a, index
        self.input_layernorm, self.post_attention_layernorm = Weight(a.hidden), Weight(a.hidden)
        self.self_attention_res_norm, self.self_attention_res_proj = Weight(a.hidden), Weight(1, a.hidden)
        self.mlp_res_norm, self.mlp_res_proj = Weight(a.hidden), Weight(1, a.hidden)
        self.self_attn = MLA(a) if index in a.mla_layers else KDA(a)
        if index < a.first_dense:
            self.mlp = MLP(a, a.dense)
        else:
            self.block_sparse_moe = LatentMoE(a)

    def forward(self, snapshots: list[Tensor], total: Tensor, ops: ModuleType) -> Tensor:
        """Return the new running sum; append to `snapshots` (mixed before archiving) on a block start."""
        gamma = self.self_attention_res_norm.weight * self.self_attention_res_proj.weight[0]
        h = ops.mix_norm([*snapshots, total], gamma, self.input_layernorm.weight, self.a.eps)
        attended = self.self_attn(h, ops)
        if self.index % self.a.block == 0:
            snapshots.append(total)
            total = attended.to(total.dtype)  # the sum restarts from the attention output
        else:
            total = total + attended
        gamma = self.mlp_res_norm.weight * self.mlp_res_proj.weight[0]
        m = ops.mix_norm([*snapshots, total], gamma, self.post_attention_layernorm.weight, self.a.eps)
        ffn = self.mlp if self.index < self.a.first_dense else self.block_sparse_moe
        return total + ffn(m, ops)


class Backbone(nn.Module):
    """Embedding, layers, final mix and norm."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.embed_tokens = Weight(a.vocab, a.hidden)
        self.layers = nn.ModuleList(Layer(a, index) for index in range(a.layers))
        self.norm, self.output_attn_res_norm = Weight(a.hidden), Weight(a.hidden)
        self.output_attn_res_proj = Weight(1, a.hidden)

    def forward(self, ids: Tensor, ops: ModuleType) -> Tensor:
        """Return the head's input [B, T, D] for ids [B, T]."""
        total, snapshots = self.embed_tokens.weight[ids], []
        for layer in self.layers:
            total = layer(snapshots, total, ops)
        gamma = self.output_attn_res_norm.weight * self.output_attn_res_proj.weight[0]
        return ops.mix_norm([*snapshots, total], gamma, self.norm.weight, self.a.eps)


class Model(nn.Module):
    """The whole text model."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a = a
        self.model = Backbone(a)
        self.lm_head = Weight(a.vocab, a.hidden)

    def forward(self, ids: Tensor, ops: ModuleType = reference_ops, keep: Tensor | None = None) -> Tensor:
        """Return logits [B, T, V], or [n, V] of the positions where the boolean `keep` [B, T] is set."""
        h = self.model(ids, ops)
        return ops.linear(h if keep is None else h[keep], self.lm_head.weight)


def initialise(model: Model, seed: int) -> None:
    """Fill every parameter from `seed`: fan-in normal matrices, uniform mixes, slow to fast decays."""
    rng = torch.Generator().manual_seed(seed)
    depth = (2 * model.a.layers) ** -0.5
    outputs = ("o_proj", "down_proj", "routed_expert_up_proj")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight")):
                p.fill_(1.0)
            elif name.endswith(("res_proj.weight", "A_log")):
                p.zero_()
            elif name.endswith("dt_bias"):
                low, high = torch.tensor((0.005, 1.0)).log()
                start = (low + (high - low) * torch.rand(p.shape, generator=rng)).exp() / 5  # |g| / 5
                p.copy_(torch.logit(start))
            elif "conv1d" in name:
                p.normal_(0, 0.2, generator=rng)
                p[..., -1] += 0.7
            elif "embed_tokens" in name:
                p.normal_(0, 0.5, generator=rng)
            else:
                std = p.shape[-1] ** -0.5 * (0.5 if "lm_head" in name else 1.0)
                residual = any(part in name for part in outputs) and "routed_expert_down" not in name
                p.normal_(0, std * (depth if residual else 1.0), generator=rng)
