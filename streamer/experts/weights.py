"""Weights of one layer as the forward pass takes them. bf16 matrices stay uint16 bits, vectors are float32.

Shapes are [out, in] (k3-spec §2.3). γ = res_norm.weight ⊙ res_proj.weight[0] is folded once at load, in
float32 (§3.2).
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """Kimi Delta Attention (§3.3). C = heads · head_dim."""

    q_proj: np.ndarray  # bf16 [C, D]
    k_proj: np.ndarray  # bf16 [C, D]
    v_proj: np.ndarray  # bf16 [C, D]
    g_proj: np.ndarray  # bf16 [C, D]
    o_proj: np.ndarray  # bf16 [D, C]
    f_a_proj: np.ndarray  # bf16 [head_dim, D]
    f_b_proj: np.ndarray  # bf16 [C, head_dim]
    b_proj: np.ndarray  # bf16 [H, D]
    q_conv: np.ndarray  # f32 [C, taps]
    k_conv: np.ndarray  # f32 [C, taps]
    v_conv: np.ndarray  # f32 [C, taps]
    a_log: np.ndarray  # f32 [H]: without its padding
    dt_bias: np.ndarray  # f32 [H, head_dim]
    o_norm: np.ndarray  # f32 [head_dim]


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """Gated latent attention (§3.4)."""

    q_a_proj: np.ndarray  # bf16 [q_rank, D]
    q_a_norm: np.ndarray  # f32 [q_rank]
    q_b_proj: np.ndarray  # bf16 [H · (nope + rope), q_rank]
    kv_a_proj: np.ndarray  # bf16 [latent + rope, D]
    kv_a_norm: np.ndarray  # f32 [latent]
    kv_b_proj: np.ndarray  # bf16 [H, nope + v, latent]
    g_proj: np.ndarray  # bf16 [H · v, D]
    o_proj: np.ndarray  # bf16 [D, H · v]


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated MLP: the dense layer's, or the fused shared experts."""

    gate_proj: np.ndarray  # bf16 [N, D]
    up_proj: np.ndarray  # bf16 [N, D]
    down_proj: np.ndarray  # bf16 [D, N]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Everything of a LatentMoE but its routed experts (§3.5, §3.6)."""

    gate: np.ndarray  # bf16 [E, D]
    bias: np.ndarray  # f32 [E]
    down_proj: np.ndarray  # bf16 [latent, D]
    up_proj: np.ndarray  # bf16 [D, latent]
    norm: np.ndarray  # f32 [latent]
    shared: MlpWeights


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """What it takes to ask a layer's router before its turn."""

    mlp_gamma: np.ndarray  # f32 [D]
    norm: np.ndarray  # f32 [D]
    gate: np.ndarray  # bf16 [E, D]
    bias: np.ndarray  # f32 [E]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer without its routed experts."""

    input_norm: np.ndarray  # f32 [D]
    post_attention_norm: np.ndarray  # f32 [D]
    attention_gamma: np.ndarray  # f32 [D]
    mlp_gamma: np.ndarray  # f32 [D]
    attention: KdaWeights | MlaWeights
    ffn: MlpWeights | MoeWeights

    @property
    def nbytes(self) -> int:
        """Bytes these arrays take in memory."""
        return sum(array.nbytes for array in _arrays(self))


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The final mix, norm and vocabulary projection."""

    gamma: np.ndarray  # f32 [D]
    norm: np.ndarray  # f32 [D]
    lm_head: np.ndarray  # bf16 [V, D]


def _arrays(weights: object) -> list[np.ndarray]:
    """Every array of a nested weights dataclass."""
    found: list[np.ndarray] = []
    for name in getattr(weights, "__slots__", ()):
        value = getattr(weights, name)
        found.extend([value] if isinstance(value, np.ndarray) else _arrays(value))
    return found
