"""The trunk: every weight that is not a routed expert, pinned in memory.

In anonymous memory, never in a mapped file that the kernel may evict (design §7).
"""

from collections.abc import Callable

import numpy as np

from storage.checkpoint import Checkpoint
from streamer.config.errors import ConfigError
from streamer.config.model import ModelConfig
from streamer.experts.weights import (
    HeadWeights,
    KdaWeights,
    LayerWeights,
    MlaWeights,
    MlpWeights,
    MoeWeights,
    RouterWeights,
)

PREFIX = "language_model."


class PinnedTrunk:
    """All layers in memory, as shipped (bf16); embedding rows on demand."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Read every layer; `progress(done, total)` is called after each."""
        self._checkpoint = checkpoint
        self._layers: list[LayerWeights] = []
        for layer in range(config.n_layers):
            self._layers.append(_read_layer(checkpoint, config, layer))
            if progress:
                progress(layer + 1, config.n_layers)
        model = f"{PREFIX}model."
        self._head = HeadWeights(
            gamma=_gamma(checkpoint, f"{model}output_attn_res"),
            norm=_vector(checkpoint, f"{model}norm.weight"),
            lm_head=checkpoint.read(f"{PREFIX}lm_head.weight"),
        )

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        head = self._head
        return sum(w.nbytes for w in self._layers) + head.gamma.nbytes + head.norm.nbytes + head.lm_head.nbytes

    def layer(self, layer: int) -> LayerWeights:
        """Weights of a layer (0-based)."""
        return self._layers[layer]

    def router(self, layer: int) -> RouterWeights | None:
        """The router of a MoE layer."""
        weights = self._layers[layer]
        assert isinstance(weights.ffn, MoeWeights)
        return RouterWeights(weights.mlp_gamma, weights.post_attention_norm, weights.ffn.gate, weights.ffn.bias)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Embedding rows as float32 [R, D]."""
        distinct, inverse = np.unique(tokens, return_inverse=True)
        rows = self._checkpoint.read_rows(f"{PREFIX}model.embed_tokens.weight", distinct)
        return _widen(rows)[inverse]

    def head(self) -> HeadWeights:
        """Final norm and vocabulary projection."""
        return self._head


def _widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bits as float32: a change of representation, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _vector(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A vector as float32, whatever it is stored as."""
    values = checkpoint.read(name)
    return _widen(values) if values.dtype == np.uint16 else values


def _gamma(checkpoint: Checkpoint, stem: str) -> np.ndarray:
    """AttnRes γ float32 [D] of `stem`_norm and `stem`_proj."""
    return _vector(checkpoint, f"{stem}_norm.weight") * _vector(checkpoint, f"{stem}_proj.weight")[0]


def _read_layer(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> LayerWeights:
    at = f"{PREFIX}model.layers.{layer}."
    read_attention = _read_mla if config.is_mla(layer) else _read_kda
    ffn: MlpWeights | MoeWeights
    if config.is_moe(layer):
        ffn = _read_moe(checkpoint, f"{at}block_sparse_moe.")
    else:
        ffn = _read_mlp(checkpoint, f"{at}mlp.")
    return LayerWeights(
        input_norm=_vector(checkpoint, f"{at}input_layernorm.weight"),
        post_attention_norm=_vector(checkpoint, f"{at}post_attention_layernorm.weight"),
        attention_gamma=_gamma(checkpoint, f"{at}self_attention_res"),
        mlp_gamma=_gamma(checkpoint, f"{at}mlp_res"),
        attention=read_attention(checkpoint, config, f"{at}self_attn."),
        ffn=ffn,
    )


def _read_kda(checkpoint: Checkpoint, config: ModelConfig, at: str) -> KdaWeights:
    kda = config.kda
    a_log = checkpoint.read(f"{at}A_log")
    if np.any(a_log[kda.n_heads :]):
        # a per-channel reading of a per-head vector is a known way to run a wrong model fluently (k3-spec §10.3)
        raise ConfigError(
            f"{at}A_log: expected zeros after the {kda.n_heads} heads, found values. "
            "This is not the released per-head layout; was the checkpoint converted?"
        )
    width, taps = kda.width, kda.conv_kernel
    return KdaWeights(
        **{name: checkpoint.read(f"{at}{name}.weight") for name in _KDA_MATRICES},
        q_conv=checkpoint.read(f"{at}q_conv1d.weight").reshape(width, taps),
        k_conv=checkpoint.read(f"{at}k_conv1d.weight").reshape(width, taps),
        v_conv=checkpoint.read(f"{at}v_conv1d.weight").reshape(width, taps),
        a_log=a_log[: kda.n_heads].copy(),
        dt_bias=checkpoint.read(f"{at}dt_bias").reshape(kda.n_heads, kda.head_dim),
        o_norm=_vector(checkpoint, f"{at}o_norm.weight"),
    )


_KDA_MATRICES = ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "f_a_proj", "f_b_proj", "b_proj")


def _read_mla(checkpoint: Checkpoint, config: ModelConfig, at: str) -> MlaWeights:
    mla = config.mla
    kv_b = checkpoint.read(f"{at}kv_b_proj.weight")
    return MlaWeights(
        q_a_proj=checkpoint.read(f"{at}q_a_proj.weight"),
        q_a_norm=_vector(checkpoint, f"{at}q_a_layernorm.weight"),
        q_b_proj=checkpoint.read(f"{at}q_b_proj.weight"),
        kv_a_proj=checkpoint.read(f"{at}kv_a_proj_with_mqa.weight"),
        kv_a_norm=_vector(checkpoint, f"{at}kv_a_layernorm.weight"),
        kv_b_proj=kv_b.reshape(mla.n_heads, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank),
        g_proj=checkpoint.read(f"{at}g_proj.weight"),
        o_proj=checkpoint.read(f"{at}o_proj.weight"),
    )


def _read_mlp(checkpoint: Checkpoint, at: str) -> MlpWeights:
    return MlpWeights(*(checkpoint.read(f"{at}{name}.weight") for name in ("gate_proj", "up_proj", "down_proj")))


def _read_moe(checkpoint: Checkpoint, at: str) -> MoeWeights:
    return MoeWeights(
        gate=checkpoint.read(f"{at}gate.weight"),
        bias=checkpoint.read(f"{at}gate.e_score_correction_bias"),
        down_proj=checkpoint.read(f"{at}routed_expert_down_proj.weight"),
        up_proj=checkpoint.read(f"{at}routed_expert_up_proj.weight"),
        norm=_vector(checkpoint, f"{at}routed_expert_norm.weight"),
        shared=_read_mlp(checkpoint, f"{at}shared_experts."),
    )
