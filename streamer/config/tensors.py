"""The tensors that a `ModelConfig` implies: names, dtypes, shapes (k3-spec §2.3, §8) and the component each belongs to.

Knows nothing about files. The preflight compares this set with what the shards hold, in both directions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from streamer.config.model import ModelConfig, VisionConfig

TEXT_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")  # text-only use never reads these

# One expert in the order in which it lies in the released shards (k3-spec §2.2): one read.
EXPERT_PARTS = (
    "w1.weight_packed",
    "w1.weight_scale",
    "w2.weight_packed",
    "w2.weight_scale",
    "w3.weight_packed",
    "w3.weight_scale",
)
MXFP4_GROUP = 32  # consecutive inputs that share one scale byte

# Component keys, in the order of the table of k3-spec §5.
COMPONENTS = {
    "experts": "routed experts",
    "kda": "KDA attention",
    "mla": "MLA attention",
    "latent": "latent projections",
    "shared": "shared experts",
    "router": "router",
    "dense": "dense MLP",
    "norms": "layer norms, AttnRes",
    "final": "final norm, AttnRes",
    "embed": "embedding",
    "head": "head",
    "projector": "vision projector",
    "vision": "vision tower",
}
VISION_COMPONENTS = ("projector", "vision")


class TensorSpec(NamedTuple):
    """What one tensor must be: safetensors dtype name and shape."""

    dtype: str
    shape: tuple[int, ...]


Specs = Iterator[tuple[str, TensorSpec]]


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """The routed experts of all layers, without spelling out half a million names.

    `template` has the fields {layer}, {expert} and {part}; `parts` are (name, shape) in canonical order, all U8.
    """

    template: str
    layers: tuple[int, ...]
    n_experts: int
    parts: tuple[tuple[str, tuple[int, int]], ...]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(rows * columns for _, (rows, columns) in self.parts)

    def name(self, layer: int, expert: int, part: int) -> str:
        """Return the tensor name of one part (0..5)."""
        return self.template.format(layer=layer, expert=expert, part=self.parts[part][0])


def expert_tensors(config: ModelConfig) -> ExpertTensors:
    """Return the routed experts' layout: w1 and w3 are [intermediate, latent], w2 is [latent, intermediate]."""
    latent, width = config.moe.latent_size, config.moe.intermediate_size
    parts = []
    for part in EXPERT_PARTS:
        rows, columns = (latent, width) if part.startswith("w2") else (width, latent)
        parts.append((part, (rows, columns // (2 if part.endswith("packed") else MXFP4_GROUP))))
    return ExpertTensors(
        template=f"{layer_prefix('{layer}')}block_sparse_moe.experts.{{expert}}.{{part}}",
        layers=config.moe_layers,
        n_experts=config.moe.n_experts,
        parts=tuple(parts),
    )


def trunk_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Return every tensor except the routed experts, the vision tower's included where the model has one."""
    return dict(_trunk(config))


def layer_prefix(layer: int | str) -> str:
    """Return what the names of a layer's tensors begin with."""
    return f"{TEXT_PREFIX}model.layers.{layer}."


def component(name: str, config: ModelConfig) -> str:
    """Return the key in `COMPONENTS` of the tensor `name`."""
    if name.startswith(VISION_PREFIXES):
        return "vision" if name.startswith("vision_tower.") else "projector"
    head = layer_prefix("")[:-1]
    if not name.startswith(head):
        globals_ = {"lm_head.weight": "head", "model.embed_tokens.weight": "embed"}
        return globals_.get(name.removeprefix(TEXT_PREFIX), "final")
    layer, _, rest = name[len(head) :].partition(".")
    if rest.startswith("self_attn."):
        return "mla" if config.is_mla(int(layer)) else "kda"
    if rest.startswith("mlp."):
        return "dense"
    if not rest.startswith("block_sparse_moe."):
        return "norms"
    rest = rest.removeprefix("block_sparse_moe.")
    prefixes = {"experts.": "experts", "shared_experts.": "shared", "gate.": "router"}
    return next((key for prefix, key in prefixes.items() if rest.startswith(prefix)), "latent")


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec("BF16", shape)


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec("F32", shape)


def _trunk(config: ModelConfig) -> Specs:
    hidden = config.hidden_size
    for layer in range(config.n_layers):
        prefix = layer_prefix(layer)
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            yield f"{prefix}{norm}.weight", _bf16(hidden)
        for projection in ("self_attention_res_proj", "mlp_res_proj"):
            yield f"{prefix}{projection}.weight", _bf16(1, hidden)
        yield from (_mla if config.is_mla(layer) else _kda)(config, f"{prefix}self_attn.")
        if config.is_moe(layer):
            yield from _moe(config, f"{prefix}block_sparse_moe.")
        else:
            yield from _mlp(f"{prefix}mlp.", hidden, config.dense_intermediate_size)
    yield f"{TEXT_PREFIX}model.embed_tokens.weight", _bf16(config.vocab_size, hidden)
    yield f"{TEXT_PREFIX}lm_head.weight", _bf16(config.vocab_size, hidden)
    yield f"{TEXT_PREFIX}model.norm.weight", _bf16(hidden)
    yield f"{TEXT_PREFIX}model.output_attn_res_norm.weight", _bf16(hidden)
    yield f"{TEXT_PREFIX}model.output_attn_res_proj.weight", _bf16(1, hidden)
    if config.vision is not None:
        yield from _vision(config.vision, hidden)


def _kda(config: ModelConfig, prefix: str) -> Specs:
    hidden, kda = config.hidden_size, config.kda
    for projection in ("q_proj", "k_proj", "v_proj", "g_proj"):
        yield f"{prefix}{projection}.weight", _bf16(kda.width, hidden)
    yield f"{prefix}o_proj.weight", _bf16(hidden, kda.width)
    for convolution in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield f"{prefix}{convolution}.weight", _f32(kda.width, 1, kda.conv_kernel)
    yield f"{prefix}f_a_proj.weight", _bf16(kda.head_dim, hidden)
    yield f"{prefix}f_b_proj.weight", _bf16(kda.width, kda.head_dim)
    yield f"{prefix}b_proj.weight", _bf16(kda.n_heads, hidden)
    yield f"{prefix}A_log", _f32(kda.head_dim)  # one value a head, stored padded with zeros to head_dim
    yield f"{prefix}dt_bias", _f32(kda.width)
    yield f"{prefix}o_norm.weight", _f32(kda.head_dim)


def _mla(config: ModelConfig, prefix: str) -> Specs:
    hidden, mla = config.hidden_size, config.mla
    value_width = mla.n_heads * mla.v_head_dim
    yield f"{prefix}q_a_proj.weight", _bf16(mla.q_lora_rank, hidden)
    yield f"{prefix}q_a_layernorm.weight", _bf16(mla.q_lora_rank)
    yield f"{prefix}q_b_proj.weight", _bf16(mla.n_heads * mla.qk_head_dim, mla.q_lora_rank)
    yield f"{prefix}kv_a_proj_with_mqa.weight", _bf16(mla.cache_width, hidden)
    yield f"{prefix}kv_a_layernorm.weight", _bf16(mla.kv_lora_rank)
    yield f"{prefix}kv_b_proj.weight", _bf16(mla.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    yield f"{prefix}g_proj.weight", _bf16(value_width, hidden)
    yield f"{prefix}o_proj.weight", _bf16(hidden, value_width)


def _mlp(prefix: str, hidden: int, width: int) -> Specs:
    yield f"{prefix}gate_proj.weight", _bf16(width, hidden)
    yield f"{prefix}up_proj.weight", _bf16(width, hidden)
    yield f"{prefix}down_proj.weight", _bf16(hidden, width)


def _moe(config: ModelConfig, prefix: str) -> Specs:
    hidden, moe = config.hidden_size, config.moe
    yield f"{prefix}gate.weight", _bf16(moe.n_experts, hidden)
    yield f"{prefix}gate.e_score_correction_bias", _f32(moe.n_experts)
    yield f"{prefix}routed_expert_down_proj.weight", _bf16(moe.latent_size, hidden)
    yield f"{prefix}routed_expert_up_proj.weight", _bf16(hidden, moe.latent_size)
    yield f"{prefix}routed_expert_norm.weight", _bf16(moe.latent_size)
    yield from _mlp(f"{prefix}shared_experts.", hidden, moe.shared_intermediate_size)


def _vision(vision: VisionConfig, text_hidden: int) -> Specs:
    width, patch = vision.hidden_size, vision.patch_size
    yield "vision_tower.patch_embed.proj.weight", _bf16(width, 3, patch, patch)
    yield "vision_tower.patch_embed.pos_emb.weight", _bf16(vision.position_height, vision.position_width, width)
    for block in range(vision.n_layers):
        prefix = f"vision_tower.encoder.blocks.{block}."
        yield f"{prefix}norm0.weight", _bf16(width)
        yield f"{prefix}norm1.weight", _bf16(width)
        yield f"{prefix}wqkv.weight", _bf16(3 * vision.qkv_size, width)
        yield f"{prefix}wo.weight", _bf16(width, vision.qkv_size)
        yield f"{prefix}mlp.fc0.weight", _bf16(vision.intermediate_size, width)
        yield f"{prefix}mlp.fc1.weight", _bf16(width, vision.intermediate_size)
    yield "vision_tower.encoder.final_layernorm.weight", _bf16(width)
    yield "mm_projector.proj.0.weight", _bf16(vision.merged_size, vision.merged_size)
    yield "mm_projector.proj.2.weight", _bf16(text_hidden, vision.merged_size)
    yield "mm_projector.post_norm.weight", _bf16(text_hidden)
