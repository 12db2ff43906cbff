"""config.json of Kimi K3 into `ModelConfig` (k3-spec §1), strictly: no default, no unknown key, all problems at once.

Works on the parsed JSON; `streamer.config.load` finds and reads the file. A key that the equations need and that is
missing would otherwise be defaulted, and the result is fluent nonsense (k3-spec §10, pitfall 1).
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from streamer.config.errors import ConfigError
from streamer.config.model import KdaConfig, MlaConfig, ModelConfig, MoeConfig, VisionConfig
from streamer.config.section import Problems, Section
from streamer.config.tensors import MXFP4_GROUP

MODEL_TYPE = "kimi_k3"
MAX_EXPERTS = 65536  # expert ids travel as 16-bit integers
MAX_LAYERS = 4096

# Keys that Hugging Face writes and that no equation reads. `head_dim` is in the released file but unused (§1).
INERT_KEYS = (
    "_attn_implementation", "_name_or_path", "add_cross_attention", "architectures", "attention_dropout",
    "attn_implementation", "auto_map", "aux_loss_alpha", "chunk_size_feed_forward", "dtype", "finetuning_task",
    "gradient_checkpointing", "head_dim", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder",
    "label2id", "problem_type", "return_dict", "router_aux_loss_coef", "seq_aux", "tokenizer_class", "torch_dtype",
    "torchscript", "transformers_version", "use_bfloat16", "use_cache", "use_grouped_topk",
)  # fmt: skip
INERT_PREFIXES = ("output_",)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TEXT_KEYS = (
    "activation_situ_beta", "activation_situ_linear_beta", "attention_bias", "attn_res_block_size",
    "first_k_dense_replace", "hidden_act", "hidden_size", "intermediate_size", "kv_lora_rank",
    "latent_moe_use_norm", "linear_attn_config", "max_position_embeddings", "mla_use_nope", "mla_use_output_gate",
    "mlp_bias", "model_type", "moe_intermediate_size", "moe_layer_freq", "moe_renormalize",
    "moe_router_activation_func", "num_attention_heads", "num_expert_group", "num_experts", "num_experts_per_token",
    "num_hidden_layers", "num_key_value_heads", "num_nextn_predict_layers", "num_shared_experts", "q_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "quantization_config", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "routed_expert_hidden_size", "routed_scaling_factor", "tie_word_embeddings",
    "topk_group", "topk_method", "v_head_dim", "vocab_size",
)  # fmt: skip
LINEAR_KEYS = (
    "full_attn_layers", "gate_lower_bound", "head_dim", "kda_layers", "num_heads", "short_conv_kernel_size",
    "use_full_rank_gate",
)  # fmt: skip


def parse_model_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the configuration in `values`; raise ConfigError naming `where` and everything that is wrong."""
    _check_model_type(values, where)
    problems = Problems()
    top = Section(values, "", problems)
    text = top.section("text_config")
    linear = (
        text.section("linear_attn_config") if text.values else Section({}, "text_config.linear_attn_config", problems)
    )
    if not text.values and not problems:
        problems.missing.append("text_config (is empty)")
    if text.values:
        text.known((*TEXT_KEYS, *TOKEN_IDS), INERT_KEYS, INERT_PREFIXES)
        linear.known(LINEAR_KEYS, (), ())
        _check_fixed(top, text, linear)
    config = _build(top, text, linear) if text.values else None
    if config is None or problems:
        lines = "\n".join(f"  - {line}" for line in problems.lines())
        raise ConfigError(f"{where} does not describe a model that this engine can run:\n{lines}")
    return config


def _check_model_type(values: Mapping[str, Any], where: str) -> None:
    found = values.get("model_type")
    if found == MODEL_TYPE:
        return
    if found is None and isinstance(values.get("text_config"), dict):
        raise ConfigError(f"{where} has no model_type; expected {MODEL_TYPE!r}. Fetch the file again.")
    kind = repr(found) if found is not None else f"{values.get('architectures') or 'unnamed'} (no model_type)"
    raise ConfigError(
        f"{where}: by its model_type this is a {kind} model; this engine runs {MODEL_TYPE!r} (Kimi K3) only"
    )


def _check_fixed(top: Section, text: Section, linear: Section) -> None:
    """Refuse every value that names a variant of the architecture that this engine does not implement."""
    text.fixed("model_type", "kimi_linear", "another text model", required=False)
    text.fixed("hidden_act", "situ", "the SiTU-GLU activation")
    text.fixed("moe_router_activation_func", "sigmoid", "router scores are sigmoids")
    text.fixed("topk_method", "noaux_tc", "selection by score plus correction bias")
    text.fixed("num_expert_group", 1, "experts are not grouped")
    text.fixed("topk_group", 1, "experts are not grouped")
    text.fixed("moe_layer_freq", 1, "every layer after the dense ones has experts")
    text.fixed("mla_use_nope", True, "nothing is rotated")
    text.fixed("mla_use_output_gate", True, "MLA output is gated")
    text.fixed("latent_moe_use_norm", True, "the latent sum is normalised")
    text.fixed("moe_renormalize", True, "expert weights sum to one")
    text.fixed("num_nextn_predict_layers", 0, "no prediction layers are shipped with Kimi K3", required=False)
    text.fixed("attention_bias", False, "no linear layer has a bias", required=False)
    text.fixed("mlp_bias", False, "no linear layer has a bias", required=False)
    linear.fixed("use_full_rank_gate", True, "the low-rank gate of Kimi Linear is another model")
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        if text.has(name):
            text.wrong(name, "no such key (Kimi K3 has no positional encoding)")
    for owner in (text, top):  # either place may have it, and one of them must
        required = owner is text and not top.has("tie_word_embeddings")
        owner.fixed("tie_word_embeddings", False, "the head has its own weights", required=required)
    _check_quantization(text if text.has("quantization_config") else top, text)


def _check_quantization(owner: Section, text: Section) -> None:
    if not owner.has("quantization_config"):
        text.problems.missing.append(text.key("quantization_config"))
        return
    section = owner.section("quantization_config")
    section.fixed("quant_method", "compressed-tensors", "experts as released", required=False)
    section.fixed("format", "mxfp4-pack-quantized", "experts are 4-bit MXFP4; another format is a conversion")
    groups = section.section("config_groups")
    if not groups.values and section.has("config_groups"):
        section.wrong("config_groups", "a group with the MXFP4 parameters")
    for name in groups.values:
        weights = groups.section(name).section("weights")
        weights.fixed("num_bits", 4, "MXFP4")
        weights.fixed("type", "float", "MXFP4")
        weights.fixed("group_size", MXFP4_GROUP, "one scale byte for 32 inputs")
        weights.fixed("scale_dtype", "torch.uint8", "E8M0 scales", required=False)
        weights.fixed("symmetric", True, "there is no zero point", required=False)


def _build(top: Section, text: Section, linear: Section) -> ModelConfig:
    n_layers = text.integer("num_hidden_layers", maximum=MAX_LAYERS)
    bos, eos, pad = (_token_id(top, text, name) for name in TOKEN_IDS)
    vision = _vision(top.section("vision_config")) if top.values.get("vision_config") else None
    return ModelConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        n_layers=n_layers,
        dense_intermediate_size=text.integer("intermediate_size"),
        first_moe_layer=_first_moe_layer(text, n_layers),
        rms_norm_eps=text.positive("rms_norm_eps"),
        attn_res_block_size=text.integer("attn_res_block_size"),
        situ_beta=text.positive("activation_situ_beta"),
        situ_linear_beta=text.positive("activation_situ_linear_beta"),
        max_position_embeddings=text.integer("max_position_embeddings"),
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        mla_layers=() if text.is_wrong("num_hidden_layers") else _mla_layers(linear, n_layers),
        kda=_kda(linear),
        mla=_mla(text),
        moe=_moe(text),
        has_vision=vision is not None,
        vision=vision,
    )


def _token_id(top: Section, text: Section, name: str) -> int:
    """Read an id that may sit at the top level, in text_config, or in both if they agree."""
    if top.has(name) and text.has(name) and top.values[name] != text.values[name]:
        top.wrong(name, f"the {text.values[name]!r} that text_config.{name} has")
    owner = text if text.has(name) or not top.has(name) else top
    value = owner.integer(name, minimum=0)
    vocab = text.integer("vocab_size")
    if not (text.is_wrong("vocab_size") or owner.is_wrong(name)) and value >= vocab:
        owner.wrong(name, f"an id below vocab_size {vocab}")
    return value


def _first_moe_layer(text: Section, n_layers: int) -> int:
    value = text.integer("first_k_dense_replace", minimum=0)
    if not (text.is_wrong("num_hidden_layers") or text.is_wrong("first_k_dense_replace")) and value >= n_layers:
        text.wrong("first_k_dense_replace", f"less than num_hidden_layers {n_layers}: some layer must have experts")
    return value


def _mla_layers(linear: Section, n_layers: int) -> tuple[int, ...]:
    """Return 0-based MLA layers; the two 1-based lists must name each of 1..n exactly once."""
    full, kda = linear.integers("full_attn_layers"), linear.integers("kda_layers")
    if linear.is_wrong("full_attn_layers") or linear.is_wrong("kda_layers"):
        return ()
    counts = Counter(full + kda)
    numbers = range(1, n_layers + 1)
    if counts != Counter(numbers):
        found = {
            "absent": [number for number in numbers if number not in counts],
            "outside": sorted(number for number in counts if number not in numbers),
            "named twice": sorted(number for number, count in counts.items() if count > 1),
        }
        detail = "; ".join(f"{what} {', '.join(map(str, which[:8]))}" for what, which in found.items() if which)
        linear.problems.wrong.append(
            f"{linear.key('full_attn_layers')} and kda_layers must name each layer of 1..{n_layers} once, counted "
            f"from 1 (num_hidden_layers is {n_layers}); found: {detail}"
        )
    return tuple(sorted(number - 1 for number in full))


def _kda(linear: Section) -> KdaConfig:
    bound = linear.number("gate_lower_bound")
    if not linear.is_wrong("gate_lower_bound") and bound >= 0:
        linear.wrong("gate_lower_bound", "a number below 0 (the floor of the log decay)")
    kda = KdaConfig(
        n_heads=linear.integer("num_heads"),
        head_dim=linear.integer("head_dim"),
        conv_kernel=linear.integer("short_conv_kernel_size"),
        gate_lower_bound=bound,
    )
    if not (linear.is_wrong("head_dim") or linear.is_wrong("num_heads")) and kda.n_heads > kda.head_dim:
        linear.wrong("num_heads", f"at most head_dim {kda.head_dim}: A_log is stored that long, one value a head")
    return kda


def _mla(text: Section) -> MlaConfig:
    n_heads = text.integer("num_attention_heads")
    if not text.is_wrong("num_attention_heads"):
        text.fixed("num_key_value_heads", n_heads, "one key head for each of num_attention_heads", required=False)
    return MlaConfig(
        n_heads=n_heads,
        q_lora_rank=text.integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
    )


def _moe(text: Section) -> MoeConfig:
    n_experts, top_k = text.integer("num_experts", maximum=MAX_EXPERTS), text.integer("num_experts_per_token")
    if not (text.is_wrong("num_experts") or text.is_wrong("num_experts_per_token")) and top_k > n_experts:
        text.wrong("num_experts_per_token", f"at most num_experts {n_experts}")
    for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
        value = text.integer(name)
        if not text.is_wrong(name) and value % MXFP4_GROUP:
            text.wrong(name, f"a multiple of {MXFP4_GROUP} (MXFP4 groups)")
    return MoeConfig(
        n_experts=n_experts,
        top_k=top_k,
        n_shared_experts=text.integer("num_shared_experts"),
        intermediate_size=text.integer("moe_intermediate_size"),
        latent_size=text.integer("routed_expert_hidden_size"),
        routed_scaling_factor=text.positive("routed_scaling_factor"),
    )


def _vision(vision: Section) -> VisionConfig:
    """Read the dimensions that the tower's tensors need (k3-spec §8)."""
    merge = vision.integers("merge_kernel_size")
    if not vision.is_wrong("merge_kernel_size") and (len(merge) != 2 or min(merge) < 1):
        vision.wrong("merge_kernel_size", "two positive integers")
    height, width = merge if len(merge) == 2 else (1, 1)
    return VisionConfig(
        n_layers=vision.integer("vt_num_hidden_layers", maximum=MAX_LAYERS),
        hidden_size=vision.integer("vt_hidden_size"),
        intermediate_size=vision.integer("vt_intermediate_size"),
        n_heads=vision.integer("vt_num_attention_heads"),
        qkv_size=vision.integer("qkv_hidden_size"),
        patch_size=vision.integer("patch_size"),
        position_height=vision.integer("init_pos_emb_height"),
        position_width=vision.integer("init_pos_emb_width"),
        merge_height=height,
        merge_width=width,
    )
