"""Weights of one layer as the forward pass takes them: matrices pinned or streamed, vectors float32 and pinned.

Shapes are [out, in] (k3-spec §2.3). γ = res_norm.weight ⊙ res_proj.weight[0] is folded once at load, in
float32 (§3.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kernels.quantised import Matrix


class StreamedMatrix(Protocol):
    """A matrix [N, K] that is read when it is used, in blocks of whole rows."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    def blocks(self) -> Iterator[tuple[int, Matrix]]:
        """Yield (first row, rows) in row order. A block is valid until the next one is asked for.

        Matrices are used in the order of the model: any other is right too, but throws away what was read ahead.
        Raises StorageError when a read fails.
        """
        ...


Projection = Matrix | StreamedMatrix  # an array holds bf16 bits, uint16 [N, K]


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """Kimi Delta Attention (§3.3). C = heads · head_dim."""

    q_proj: Projection  # [C, D]
    k_proj: Projection  # [C, D]
    v_proj: Projection  # [C, D]
    g_proj: Projection  # [C, D]
    o_proj: Projection  # [D, C]
    f_a_proj: Projection  # [head_dim, D], exact in every format
    f_b_proj: Projection  # [C, head_dim], exact in every format
    b_proj: Projection  # [H, D], exact in every format
    q_conv: np.ndarray  # f32 [C, taps]
    k_conv: np.ndarray  # f32 [C, taps]
    v_conv: np.ndarray  # f32 [C, taps]
    a_log: np.ndarray  # f32 [H]: without its padding
    dt_bias: np.ndarray  # f32 [H, head_dim]
    o_norm: np.ndarray  # f32 [head_dim]


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """Gated latent attention (§3.4)."""

    q_a_proj: Projection  # [q_rank, D]
    q_a_norm: np.ndarray  # f32 [q_rank]
    q_b_proj: Projection  # [H · (nope + rope), q_rank]
    kv_a_proj: Projection  # [latent + rope, D]
    kv_a_norm: np.ndarray  # f32 [latent]
    kv_b_proj: Projection  # [H · (nope + v), latent], exact in every format, used whole
    g_proj: Projection  # [H · v, D]
    o_proj: Projection  # [D, H · v]


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated MLP: the dense layer's, or the fused shared experts."""

    gate_proj: Projection  # [N, D]
    up_proj: Projection  # [N, D]
    down_proj: Projection  # [D, N]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Everything of a LatentMoE but its routed experts (§3.5, §3.6)."""

    gate: Projection  # [E, D], exact in every format
    bias: np.ndarray  # f32 [E]
    down_proj: Projection  # [latent, D]
    up_proj: Projection  # [D, latent]
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


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The final mix, norm and vocabulary projection."""

    gamma: np.ndarray  # f32 [D]
    norm: np.ndarray  # f32 [D]
    lm_head: Projection  # [V, D]
