"""Puts a layer's weights together: matrices from wherever they are, vectors read and widened here."""

from collections.abc import Callable

import numpy as np

from storage.checkpoint import Checkpoint
from streamer.config.errors import ConfigError
from streamer.config.model import ModelConfig
from streamer.config.tensors import TEXT_PREFIX, layer_prefix
from streamer.experts.matrices import (
    TrunkMatrix,
    head_matrix,
    kda_matrices,
    mla_matrices,
    mlp_matrices,
    moe_matrices,
    shared_matrices,
)
from streamer.experts.weights import (
    HeadWeights,
    KdaWeights,
    LayerWeights,
    MlaWeights,
    MlpWeights,
    MoeWeights,
    Projection,
)

MatrixOf = Callable[[TrunkMatrix], Projection]


def read_layer(checkpoint: Checkpoint, config: ModelConfig, layer: int, matrix_of: MatrixOf) -> LayerWeights:
    """A layer (0-based), its matrices from `matrix_of`. Raises StorageError, and ConfigError for a foreign A_log."""
    at = layer_prefix(layer)
    read_attention = _read_mla if config.is_mla(layer) else _read_kda
    ffn: MlpWeights | MoeWeights
    if config.is_moe(layer):
        ffn = _read_moe(checkpoint, config, f"{at}block_sparse_moe.", matrix_of)
    else:
        ffn = _mlp(mlp_matrices(config.hidden_size, config.dense_intermediate_size, f"{at}mlp."), matrix_of)
    return LayerWeights(
        input_norm=_vector(checkpoint, f"{at}input_layernorm.weight"),
        post_attention_norm=_vector(checkpoint, f"{at}post_attention_layernorm.weight"),
        attention_gamma=_gamma(checkpoint, f"{at}self_attention_res"),
        mlp_gamma=_gamma(checkpoint, f"{at}mlp_res"),
        attention=read_attention(checkpoint, config, f"{at}self_attn.", matrix_of),
        ffn=ffn,
    )


def read_head(checkpoint: Checkpoint, config: ModelConfig, matrix_of: MatrixOf) -> HeadWeights:
    """The final mix, norm and vocabulary projection."""
    model = f"{TEXT_PREFIX}model."
    return HeadWeights(
        gamma=_gamma(checkpoint, f"{model}output_attn_res"),
        norm=_vector(checkpoint, f"{model}norm.weight"),
        lm_head=matrix_of(head_matrix(config)),
    )


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bits as float32: a change of representation, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _vector(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A vector as float32, whatever it is stored as."""
    values = checkpoint.read(name)
    return widen(values) if values.dtype == np.uint16 else values


def _gamma(checkpoint: Checkpoint, stem: str) -> np.ndarray:
    """AttnRes γ float32 [D] of `stem`_norm and `stem`_proj."""
    return _vector(checkpoint, f"{stem}_norm.weight") * _vector(checkpoint, f"{stem}_proj.weight")[0]


def _read_kda(checkpoint: Checkpoint, config: ModelConfig, at: str, matrix_of: MatrixOf) -> KdaWeights:
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
        **{matrix.field: matrix_of(matrix) for matrix in kda_matrices(config, at)},
        q_conv=checkpoint.read(f"{at}q_conv1d.weight").reshape(width, taps),
        k_conv=checkpoint.read(f"{at}k_conv1d.weight").reshape(width, taps),
        v_conv=checkpoint.read(f"{at}v_conv1d.weight").reshape(width, taps),
        a_log=a_log[: kda.n_heads].copy(),
        dt_bias=checkpoint.read(f"{at}dt_bias").reshape(kda.n_heads, kda.head_dim),
        o_norm=_vector(checkpoint, f"{at}o_norm.weight"),
    )


def _read_mla(checkpoint: Checkpoint, config: ModelConfig, at: str, matrix_of: MatrixOf) -> MlaWeights:
    return MlaWeights(
        **{matrix.field: matrix_of(matrix) for matrix in mla_matrices(config, at)},
        q_a_norm=_vector(checkpoint, f"{at}q_a_layernorm.weight"),
        kv_a_norm=_vector(checkpoint, f"{at}kv_a_layernorm.weight"),
    )


def _mlp(matrices: tuple[TrunkMatrix, ...], matrix_of: MatrixOf) -> MlpWeights:
    return MlpWeights(**{matrix.field: matrix_of(matrix) for matrix in matrices})


def _read_moe(checkpoint: Checkpoint, config: ModelConfig, at: str, matrix_of: MatrixOf) -> MoeWeights:
    shared = shared_matrices(config, at)
    return MoeWeights(
        **{matrix.field: matrix_of(matrix) for matrix in moe_matrices(config, at) if matrix not in shared},
        bias=checkpoint.read(f"{at}gate.e_score_correction_bias"),
        norm=_vector(checkpoint, f"{at}routed_expert_norm.weight"),
        shared=_mlp(shared, matrix_of),
    )
