"""Dimensions of k3-nano, and their rendering as the released config.json.

Every field has the released meaning; only the numbers are small. Knows nothing about torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BASE_VOCAB = 1792
RESERVED = 256

# Offsets of the named reserved tokens from the size of the BPE vocabulary, as released.
RESERVED_NAMES: dict[int, str] = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
BOS, EOS, END_OF_MSG, OPEN, CLOSE, SEP = (BASE_VOCAB + offset for offset in range(6))
MEDIA_PAD = BASE_VOCAB + 21
PAD = BASE_VOCAB + 255

IGNORED_MODULES = [
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
]


@dataclass(frozen=True, slots=True)
class Architecture:
    """K3's dimensions; layer lists are 0-based here and 1-based only in config.json."""

    vocab: int = BASE_VOCAB + RESERVED
    hidden: int = 192
    layers: int = 9
    mla_layers: tuple[int, ...] = (3, 7, 8)
    block: int = 3
    kda_heads: int = 3
    kda_dim: int = 64
    conv: int = 4
    gate_lower_bound: float = -5.0
    mla_heads: int = 3
    q_lora: int = 96
    kv_lora: int = 64
    nope: int = 48
    rope: int = 16
    v_dim: int = 64
    dense: int = 384
    first_dense: int = 1
    experts: int = 32
    top_k: int = 4
    shared: int = 2
    latent: int = 128
    expert: int = 64
    gate_cap: float = 4.0
    up_cap: float = 25.0
    eps: float = 1e-5
    latent_eps: float = 1e-6  # the released code leaves the two MLA latent norms at the class default
    context: int = 4096

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based indices of the KDA layers."""
        return tuple(layer for layer in range(self.layers) if layer not in self.mla_layers)

    def text_config(self) -> dict[str, Any]:
        """Return `text_config` under the released keys."""
        return {
            "model_type": "kimi_linear",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.mla_heads,
            "num_key_value_heads": self.mla_heads,
            "head_dim": self.kda_dim,
            "intermediate_size": self.dense,
            "hidden_act": "situ",
            "activation_situ_beta": self.gate_cap,
            "activation_situ_linear_beta": self.up_cap,
            "rms_norm_eps": self.eps,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": False,
            "attn_res_block_size": self.block,
            "first_k_dense_replace": self.first_dense,
            "moe_layer_freq": 1,
            "num_experts": self.experts,
            "num_experts_per_token": self.top_k,
            "num_shared_experts": self.shared,
            "moe_intermediate_size": self.expert,
            "routed_expert_hidden_size": self.latent,
            "latent_moe_use_norm": True,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "topk_method": "noaux_tc",
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "q_lora_rank": self.q_lora,
            "kv_lora_rank": self.kv_lora,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.v_dim,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "num_nextn_predict_layers": 0,
            "bos_token_id": BOS,
            "eos_token_id": END_OF_MSG,
            "pad_token_id": PAD,
            "dtype": "bfloat16",
            "linear_attn_config": {
                "num_heads": self.kda_heads,
                "head_dim": self.kda_dim,
                "short_conv_kernel_size": self.conv,
                "gate_lower_bound": self.gate_lower_bound,
                "use_full_rank_gate": True,
                "full_attn_layers": [layer + 1 for layer in self.mla_layers],
                "kda_layers": [layer + 1 for layer in self.kda_layers],
            },
            "quantization_config": quantization_config(),
        }

    def config(self) -> dict[str, Any]:
        """Return the whole config.json; `vision_config` is null because there is no tower."""
        return {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "bos_token_id": BOS,
            "eos_token_id": END_OF_MSG,
            "pad_token_id": PAD,
            "media_placeholder_token_id": MEDIA_PAD,
            "image_placeholder": "<|kimi_image_placeholder|>",
            "ignore_index": -100,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "text_config": self.text_config(),
            "vision_config": None,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Architecture:
        """Rebuild the dimensions from a config.json of this family; a missing key raises KeyError."""
        text = config["text_config"]
        linear = text["linear_attn_config"]
        return cls(
            vocab=text["vocab_size"],
            hidden=text["hidden_size"],
            layers=text["num_hidden_layers"],
            mla_layers=tuple(layer - 1 for layer in linear["full_attn_layers"]),
            block=text["attn_res_block_size"],
            kda_heads=linear["num_heads"],
            kda_dim=linear["head_dim"],
            conv=linear["short_conv_kernel_size"],
            gate_lower_bound=linear["gate_lower_bound"],
            mla_heads=text["num_attention_heads"],
            q_lora=text["q_lora_rank"],
            kv_lora=text["kv_lora_rank"],
            nope=text["qk_nope_head_dim"],
            rope=text["qk_rope_head_dim"],
            v_dim=text["v_head_dim"],
            dense=text["intermediate_size"],
            first_dense=text["first_k_dense_replace"],
            experts=text["num_experts"],
            top_k=text["num_experts_per_token"],
            shared=text["num_shared_experts"],
            latent=text["routed_expert_hidden_size"],
            expert=text["moe_intermediate_size"],
            gate_cap=text["activation_situ_beta"],
            up_cap=text["activation_situ_linear_beta"],
            eps=text["rms_norm_eps"],
            context=text["max_position_embeddings"],
        )


def quantization_config() -> dict[str, Any]:
    """Return the released compressed-tensors block: MXFP4 for routed experts only."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
        "observer": "minmax",
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(IGNORED_MODULES),
    }
