"""The matrices of the trunk, in the order in which a step multiplies by them: what a read-ahead has to know.

Names and shapes follow from the configuration alone (k3-spec §2.3); the order is that of `streamer.model`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from streamer.config.model import ModelConfig
from streamer.config.tensors import TEXT_PREFIX, layer_prefix


@dataclass(frozen=True, slots=True)
class TrunkMatrix:
    """One bf16 matrix [rows, columns] of a checkpoint, and the field of `streamer.experts.weights` it fills."""

    name: str  # of the tensor
    field: str
    rows: int
    columns: int
    exact: bool = False  # stays bf16 in every format (design §7)
    whole: bool = False  # used in one piece: its product is not one of rows
    router: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as shipped."""
        return 2 * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes as shipped."""
        return self.rows * self.row_bytes


def layer_matrices(config: ModelConfig, layer: int) -> tuple[TrunkMatrix, ...]:
    """Every matrix of a layer (0-based) but its routed experts, in order of use."""
    at = layer_prefix(layer)
    attention = mla_matrices if config.is_mla(layer) else kda_matrices
    if not config.is_moe(layer):
        ffn = mlp_matrices(config.hidden_size, config.dense_intermediate_size, f"{at}mlp.")
    else:
        ffn = moe_matrices(config, f"{at}block_sparse_moe.")
    return (*attention(config, f"{at}self_attn."), *ffn)


def head_matrix(config: ModelConfig) -> TrunkMatrix:
    """The vocabulary projection, used after the last layer."""
    return TrunkMatrix(f"{TEXT_PREFIX}lm_head.weight", "lm_head", config.vocab_size, config.hidden_size)


def trunk_matrices(config: ModelConfig) -> Iterator[TrunkMatrix]:
    """Every matrix of one step, in order of use."""
    for layer in range(config.n_layers):
        yield from layer_matrices(config, layer)
    yield head_matrix(config)


def kda_matrices(config: ModelConfig, at: str) -> tuple[TrunkMatrix, ...]:
    """Kimi Delta Attention; its decay (f_a, f_b) and step size (b) are exact in every format."""
    hidden, width = config.hidden_size, config.kda.width
    return (
        *(TrunkMatrix(f"{at}{name}.weight", name, width, hidden) for name in ("q_proj", "k_proj", "v_proj")),
        TrunkMatrix(f"{at}f_a_proj.weight", "f_a_proj", config.kda.head_dim, hidden, exact=True),
        TrunkMatrix(f"{at}f_b_proj.weight", "f_b_proj", width, config.kda.head_dim, exact=True),
        TrunkMatrix(f"{at}b_proj.weight", "b_proj", config.kda.n_heads, hidden, exact=True),
        TrunkMatrix(f"{at}g_proj.weight", "g_proj", width, hidden),
        TrunkMatrix(f"{at}o_proj.weight", "o_proj", hidden, width),
    )


def mla_matrices(config: ModelConfig, at: str) -> tuple[TrunkMatrix, ...]:
    """Gated latent attention; kv_b is absorbed, which adds over its rows: exact, and needed whole."""
    hidden, mla = config.hidden_size, config.mla
    latent, width = mla.kv_lora_rank, mla.n_heads * mla.v_head_dim
    kv_b_rows = mla.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return (
        TrunkMatrix(f"{at}q_a_proj.weight", "q_a_proj", mla.q_lora_rank, hidden),
        TrunkMatrix(f"{at}q_b_proj.weight", "q_b_proj", mla.n_heads * mla.qk_head_dim, mla.q_lora_rank),
        TrunkMatrix(f"{at}kv_a_proj_with_mqa.weight", "kv_a_proj", mla.cache_width, hidden),
        TrunkMatrix(f"{at}kv_b_proj.weight", "kv_b_proj", kv_b_rows, latent, exact=True, whole=True),
        TrunkMatrix(f"{at}g_proj.weight", "g_proj", width, hidden),
        TrunkMatrix(f"{at}o_proj.weight", "o_proj", hidden, width),
    )


def mlp_matrices(hidden: int, width: int, at: str) -> tuple[TrunkMatrix, ...]:
    """A gated MLP."""
    return (
        TrunkMatrix(f"{at}gate_proj.weight", "gate_proj", width, hidden),
        TrunkMatrix(f"{at}up_proj.weight", "up_proj", width, hidden),
        TrunkMatrix(f"{at}down_proj.weight", "down_proj", hidden, width),
    )


def moe_matrices(config: ModelConfig, at: str) -> tuple[TrunkMatrix, ...]:
    """A LatentMoE without its routed experts: router, down to the latent, shared experts, up again."""
    hidden, moe = config.hidden_size, config.moe
    return (
        TrunkMatrix(f"{at}gate.weight", "gate", moe.n_experts, hidden, exact=True, router=True),
        TrunkMatrix(f"{at}routed_expert_down_proj.weight", "down_proj", moe.latent_size, hidden),
        *shared_matrices(config, at),
        TrunkMatrix(f"{at}routed_expert_up_proj.weight", "up_proj", hidden, moe.latent_size),
    )


def shared_matrices(config: ModelConfig, at: str) -> tuple[TrunkMatrix, ...]:
    """The shared experts of a LatentMoE, fused into one MLP."""
    return mlp_matrices(config.hidden_size, config.moe.shared_intermediate_size, f"{at}shared_experts.")
