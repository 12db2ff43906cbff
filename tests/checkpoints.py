"""Small random K3 checkpoints in the released layout, and the released header set as sparse files.

Written from k3-spec §1, §2 and §8 with numpy only, and deliberately not from the code under test: the tensor table here
is the second opinion. One `seed` and one name give one tensor, whatever the sharding or the order in a file.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

DTYPE_BYTES = {"F32": 4, "BF16": 2, "U8": 1}
EXPERT_PARTS = (
    "w1.weight_packed",
    "w1.weight_scale",
    "w2.weight_packed",
    "w2.weight_scale",
    "w3.weight_packed",
    "w3.weight_scale",
)
Table = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Dims:
    """Every dimension that `write_checkpoint` can vary; `full_attn_layers` is 1-based, as in config.json."""

    hidden: int = 64
    layers: int = 6
    full_attn_layers: tuple[int, ...] = (3, 5, 6)
    block: int = 2
    kda_heads: int = 2
    kda_head_dim: int = 32
    conv_kernel: int = 4
    mla_heads: int = 2
    q_lora: int = 32
    kv_lora: int = 32
    nope: int = 16
    rope: int = 8
    v_dim: int = 16
    dense: int = 96
    first_dense: int = 1
    experts: int = 8
    top_k: int = 2
    shared: int = 2
    latent: int = 32
    moe_intermediate: int = 32
    routed_scaling_factor: float = 1.0
    vocab: int = 300
    context: int = 4096
    vision: bool = False
    vision_layers: int = 2
    vision_hidden: int = 32
    vision_intermediate: int = 64
    vision_qkv: int = 48
    vision_heads: int = 2
    vision_positions: int = 4
    contiguous: bool = True  # False: all packed tensors of a layer, then all scales: six reads an expert
    layers_per_shard: int = 1


RELEASED = Dims(
    hidden=7168, layers=93, full_attn_layers=(*range(4, 93, 4), 93), block=12, kda_heads=96, kda_head_dim=128,
    mla_heads=96, q_lora=1536, kv_lora=512, nope=128, rope=64, v_dim=128, dense=33792, experts=896, top_k=16,
    latent=3584, moe_intermediate=3072, vocab=163840, context=1048576, vision=True, vision_layers=27,
    vision_hidden=1024, vision_intermediate=4096, vision_qkv=1536, vision_heads=12, vision_positions=64,
)  # fmt: skip


def write_checkpoint(directory: Path, *, seed: int = 0, **overrides: Any) -> dict[str, Any]:
    """Write config.json, generation_config.json, shards and index into `directory`; return the config.

    `overrides` are fields of `Dims`. Weights are scaled so that activations stay O(1) and logits O(1-10).
    """
    unknown = set(overrides) - {field.name for field in fields(Dims)}
    if unknown:
        raise TypeError(f"unknown dimension {sorted(unknown)}; Dims has {[field.name for field in fields(Dims)]}")
    dims = Dims(**overrides)
    directory.mkdir(parents=True, exist_ok=True)
    shards = shard_tables(dims)
    for name, table in shards.items():
        write_shard(
            directory / name, table, lambda tensor, dtype, shape: random_tensor(dims, seed, tensor, dtype, shape)
        )
    return _write_metadata(directory, dims, shards)


def write_released_headers(directory: Path) -> dict[str, Any]:
    """Write the 96 released shards with real headers and holes for data; return the config. Takes 76 MB on disk."""
    directory.mkdir(parents=True, exist_ok=True)
    shards = shard_tables(RELEASED)
    for name, table in shards.items():
        header, data_bytes = encode_header(table)
        with (directory / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + data_bytes)
    return _write_metadata(directory, RELEASED, shards)


def write_shard(path: Path, table: Table, make: Any) -> None:
    """Write `table` in its own order; `make(name, dtype, shape)` returns each tensor's bytes."""
    header, _ = encode_header(table)
    with path.open("wb") as file:
        file.write(header)
        for name, (dtype, shape) in table.items():
            file.write(make(name, dtype, shape))


def encode_header(table: Table) -> tuple[bytes, int]:
    """Return (length prefix and JSON padded to 8 bytes, data bytes) for tensors laid out in the order of `table`.

    Without `__metadata__`: only so do the published shard sizes come out to the byte.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape) in table.items():
        end = offset + DTYPE_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offset


def shard_tables(dims: Dims) -> dict[str, Table]:
    """Return shard file name → tensors in file order (k3-spec §2.1, §2.2): layers, then globals, projector, tower."""
    step = dims.layers_per_shard
    parts = [
        {name: spec for layer in range(start, min(start + step, dims.layers)) for name, spec in _layer(dims, layer)}
        for start in range(0, dims.layers, step)
    ]
    parts.append(dict(_globals(dims)))
    if dims.vision:
        parts += [dict(_projector(dims)), dict(_tower(dims))]
    names = [f"model-{i:05d}-of-{len(parts):06d}.safetensors" for i in range(1, len(parts) + 1)]
    return {name: _file_order(part, dims.contiguous) for name, part in zip(names, parts, strict=True)}


def _file_order(table: Table, contiguous: bool) -> Table:
    """Order as the standard serialiser does: dtype (F32, BF16, U8), then name; scattered puts scales after packed."""

    def key(name: str) -> tuple[int, bool, str]:
        return list(DTYPE_BYTES).index(table[name][0]), not contiguous and name.endswith("_scale"), name

    return {name: table[name] for name in sorted(table, key=key)}


Specs = Iterator[tuple[str, tuple[str, tuple[int, ...]]]]


def _globals(dims: Dims) -> Specs:
    prefix = "language_model.model."
    yield f"{prefix}embed_tokens.weight", ("BF16", (dims.vocab, dims.hidden))
    yield "language_model.lm_head.weight", ("BF16", (dims.vocab, dims.hidden))
    for name in ("norm", "output_attn_res_norm"):
        yield f"{prefix}{name}.weight", ("BF16", (dims.hidden,))
    yield f"{prefix}output_attn_res_proj.weight", ("BF16", (1, dims.hidden))


def _layer(dims: Dims, layer: int) -> Specs:
    prefix = f"language_model.model.layers.{layer}."
    for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
        yield f"{prefix}{name}.weight", ("BF16", (dims.hidden,))
    for name in ("self_attention_res_proj", "mlp_res_proj"):
        yield f"{prefix}{name}.weight", ("BF16", (1, dims.hidden))
    attention = _mla if layer + 1 in dims.full_attn_layers else _kda
    yield from attention(dims, f"{prefix}self_attn.")
    if layer < dims.first_dense:
        yield from _mlp(f"{prefix}mlp.", dims.hidden, dims.dense)
    else:
        yield from _moe(dims, f"{prefix}block_sparse_moe.")


def _mlp(prefix: str, hidden: int, width: int) -> Specs:
    for name in ("gate", "up"):
        yield f"{prefix}{name}_proj.weight", ("BF16", (width, hidden))
    yield f"{prefix}down_proj.weight", ("BF16", (hidden, width))


def _kda(dims: Dims, prefix: str) -> Specs:
    width, rank = dims.kda_heads * dims.kda_head_dim, dims.kda_head_dim
    for name in "qkvg":
        yield f"{prefix}{name}_proj.weight", ("BF16", (width, dims.hidden))
    yield f"{prefix}o_proj.weight", ("BF16", (dims.hidden, width))
    for name in "qkv":
        yield f"{prefix}{name}_conv1d.weight", ("F32", (width, 1, dims.conv_kernel))
    yield f"{prefix}f_a_proj.weight", ("BF16", (rank, dims.hidden))
    yield f"{prefix}f_b_proj.weight", ("BF16", (width, rank))
    yield f"{prefix}b_proj.weight", ("BF16", (dims.kda_heads, dims.hidden))
    yield f"{prefix}A_log", ("F32", (dims.kda_head_dim,))
    yield f"{prefix}dt_bias", ("F32", (width,))
    yield f"{prefix}o_norm.weight", ("F32", (dims.kda_head_dim,))


def _mla(dims: Dims, prefix: str) -> Specs:
    heads = dims.mla_heads
    yield f"{prefix}q_a_proj.weight", ("BF16", (dims.q_lora, dims.hidden))
    yield f"{prefix}q_a_layernorm.weight", ("BF16", (dims.q_lora,))
    yield f"{prefix}q_b_proj.weight", ("BF16", (heads * (dims.nope + dims.rope), dims.q_lora))
    yield f"{prefix}kv_a_proj_with_mqa.weight", ("BF16", (dims.kv_lora + dims.rope, dims.hidden))
    yield f"{prefix}kv_a_layernorm.weight", ("BF16", (dims.kv_lora,))
    yield f"{prefix}kv_b_proj.weight", ("BF16", (heads * (dims.nope + dims.v_dim), dims.kv_lora))
    yield f"{prefix}g_proj.weight", ("BF16", (heads * dims.v_dim, dims.hidden))
    yield f"{prefix}o_proj.weight", ("BF16", (dims.hidden, heads * dims.v_dim))


def _moe(dims: Dims, prefix: str) -> Specs:
    yield f"{prefix}gate.weight", ("BF16", (dims.experts, dims.hidden))
    yield f"{prefix}gate.e_score_correction_bias", ("F32", (dims.experts,))
    yield f"{prefix}routed_expert_down_proj.weight", ("BF16", (dims.latent, dims.hidden))
    yield f"{prefix}routed_expert_up_proj.weight", ("BF16", (dims.hidden, dims.latent))
    yield f"{prefix}routed_expert_norm.weight", ("BF16", (dims.latent,))
    yield from _mlp(f"{prefix}shared_experts.", dims.hidden, dims.shared * dims.moe_intermediate)
    for expert in range(dims.experts):
        for part in EXPERT_PARTS:
            rows, columns = (
                (dims.latent, dims.moe_intermediate) if part[1] == "2" else (dims.moe_intermediate, dims.latent)
            )
            shape = (rows, columns // (2 if part.endswith("packed") else 32))
            yield f"{prefix}experts.{expert}.{part}", ("U8", shape)


def _projector(dims: Dims) -> Specs:
    merged = 4 * dims.vision_hidden
    yield "mm_projector.proj.0.weight", ("BF16", (merged, merged))
    yield "mm_projector.proj.2.weight", ("BF16", (dims.hidden, merged))
    yield "mm_projector.post_norm.weight", ("BF16", (dims.hidden,))


def _tower(dims: Dims) -> Specs:
    width, positions = dims.vision_hidden, dims.vision_positions
    yield "vision_tower.patch_embed.proj.weight", ("BF16", (width, 3, 14, 14))
    yield "vision_tower.patch_embed.pos_emb.weight", ("BF16", (positions, positions, width))
    for block in range(dims.vision_layers):
        prefix = f"vision_tower.encoder.blocks.{block}."
        for norm in ("norm0", "norm1"):
            yield f"{prefix}{norm}.weight", ("BF16", (width,))
        yield f"{prefix}wqkv.weight", ("BF16", (3 * dims.vision_qkv, width))
        yield f"{prefix}wo.weight", ("BF16", (width, dims.vision_qkv))
        yield f"{prefix}mlp.fc0.weight", ("BF16", (dims.vision_intermediate, width))
        yield f"{prefix}mlp.fc1.weight", ("BF16", (width, dims.vision_intermediate))
    yield "vision_tower.encoder.final_layernorm.weight", ("BF16", (width,))


def random_tensor(dims: Dims, seed: int, name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the bytes of one tensor; a function of (seed, name, shape) alone."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if dtype == "U8":
        # Uniform nibbles have a standard deviation of 2.9; these scales bring a 32-wide row to unit gain.
        low, high = (118, 125) if name.endswith("_scale") else (0, 256)
        return rng.integers(low, high, shape, dtype=np.uint8).tobytes()
    values = _float_values(rng, dims, name, shape).astype("<f4")
    return values.tobytes() if dtype == "F32" else to_bf16(values).tobytes()


def _float_values(rng: np.random.Generator, dims: Dims, name: str, shape: tuple[int, ...]) -> np.ndarray:
    normal = rng.standard_normal(shape)
    if name.endswith("A_log"):
        return np.where(np.arange(shape[0]) < dims.kda_heads, 0.5 * normal, 0.0)  # padding is exactly zero
    if name.endswith("dt_bias"):
        return normal - 2.0  # a logit: most channels decay slowly, some fast
    if name.endswith("e_score_correction_bias"):
        return 0.02 * normal
    if "norm" in name.rsplit(".", 2)[-2]:
        return np.clip(1.0 + 0.1 * normal, 0.5, 1.5)
    if name.endswith("conv1d.weight"):
        return 0.5 * normal
    if name.endswith("embed_tokens.weight"):
        return normal
    gain = 3.0 if name.endswith("lm_head.weight") else 1.0  # logits of a few units
    return gain * normal / math.sqrt(math.prod(shape[1:]))


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16 bits, ties to even (uint16)."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _write_metadata(directory: Path, dims: Dims, shards: dict[str, Table]) -> dict[str, Any]:
    config = make_config(dims)
    write_json(directory / "config.json", config)
    eos = config["eos_token_id"]
    write_json(directory / "generation_config.json", {"eos_token_id": eos, "temperature": 1.0, "top_p": 0.95})
    write_json(directory / "model.safetensors.index.json", make_index(shards))
    return config


def make_index(shards: dict[str, Table]) -> dict[str, Any]:
    """Return the content of model.safetensors.index.json."""
    specs = [spec for table in shards.values() for spec in table.values()]
    total = sum(DTYPE_BYTES[dtype] * math.prod(shape) for dtype, shape in specs)
    weight_map = {name: shard for shard, table in shards.items() for name in table}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def write_json(path: Path, value: Any) -> None:
    """Write UTF-8 JSON."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def make_config(dims: Dims) -> dict[str, Any]:
    """Return config.json for `dims` under the released keys (k3-spec §1)."""
    base = max(dims.vocab - 256, 0)
    ids = {"bos_token_id": base, "eos_token_id": min(base + 2, dims.vocab - 1), "pad_token_id": dims.vocab - 1}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        **ids,
        "media_placeholder_token_id": min(base + 21, dims.vocab - 1),
        "image_placeholder": "<|kimi_image_placeholder|>",
        "ignore_index": -100,
        "transformers_version": "4.56.2",
        "dtype": "bfloat16",
        "text_config": {**_text_config(dims), **ids},
        "vision_config": _vision_config(dims) if dims.vision else None,
    }


def _text_config(dims: Dims) -> dict[str, Any]:
    return {
        "model_type": "kimi_linear",
        "vocab_size": dims.vocab,
        "hidden_size": dims.hidden,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.mla_heads,
        "num_key_value_heads": dims.mla_heads,
        "head_dim": dims.kda_head_dim,
        "intermediate_size": dims.dense,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": dims.context,
        "tie_word_embeddings": False,
        "attn_res_block_size": dims.block,
        "first_k_dense_replace": dims.first_dense,
        "moe_layer_freq": 1,
        "num_experts": dims.experts,
        "num_experts_per_token": dims.top_k,
        "num_shared_experts": dims.shared,
        "moe_intermediate_size": dims.moe_intermediate,
        "routed_expert_hidden_size": dims.latent,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        **{"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1},
        "routed_scaling_factor": dims.routed_scaling_factor,
        "q_lora_rank": dims.q_lora,
        "kv_lora_rank": dims.kv_lora,
        "qk_nope_head_dim": dims.nope,
        "qk_rope_head_dim": dims.rope,
        "v_head_dim": dims.v_dim,
        **{"mla_use_nope": True, "mla_use_output_gate": True},
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "num_heads": dims.kda_heads,
            "head_dim": dims.kda_head_dim,
            "short_conv_kernel_size": dims.conv_kernel,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": list(dims.full_attn_layers),
            "kda_layers": [number for number in range(1, dims.layers + 1) if number not in dims.full_attn_layers],
        },
        "quantization_config": _quantization_config(),
    }


def _quantization_config() -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    group = {"targets": ["Linear"], "weights": {**weights, "symmetric": True, "dynamic": False}}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"],
    }


def _vision_config(dims: Dims) -> dict[str, Any]:
    return {
        "model_type": "moonvit3d",
        "patch_size": 14,
        "init_pos_emb_height": dims.vision_positions,
        "init_pos_emb_width": dims.vision_positions,
        "vt_num_attention_heads": dims.vision_heads,
        "vt_num_hidden_layers": dims.vision_layers,
        "vt_hidden_size": dims.vision_hidden,
        "vt_intermediate_size": dims.vision_intermediate,
        "qkv_hidden_size": dims.vision_qkv,
        "merge_kernel_size": [2, 2],
    }
