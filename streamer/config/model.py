"""What a K3 checkpoint is, as frozen dataclasses (k3-spec §1). Layer numbers are 0-based here, 1-based in the file.

Knows nothing about files: `streamer.config.load` reads config.json into these.
"""

from dataclasses import dataclass

LATENT_NORM_EPS = 1e-6  # k3-spec §3.4: the released code builds the two MLA latent norms without passing rms_norm_eps


@dataclass(frozen=True, slots=True)
class KdaConfig:
    """Kimi Delta Attention (k3-spec §3.3). Key and value dims are both `head_dim`."""

    n_heads: int
    head_dim: int
    conv_kernel: int
    gate_lower_bound: float

    @property
    def width(self) -> int:
        """Channels of q, k or v: n_heads * head_dim."""
        return self.n_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Gated multi-head latent attention without rotation (k3-spec §3.4)."""

    n_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float = LATENT_NORM_EPS

    @property
    def qk_head_dim(self) -> int:
        """Query width of one head: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Values cached per token and layer: latent, then the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """LatentMoE (k3-spec §3.5, §3.6)."""

    n_experts: int
    top_k: int
    n_shared_experts: int
    intermediate_size: int
    latent_size: int
    routed_scaling_factor: float

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the fused shared experts."""
        return self.n_shared_experts * self.intermediate_size


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Dimensions of the vision tower and projector (k3-spec §8); their fixed constants live with the code."""

    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    qkv_size: int
    patch_size: int
    position_height: int
    position_width: int
    merge_height: int
    merge_width: int

    @property
    def merged_size(self) -> int:
        """Width after neighbouring patches are concatenated: the projector's input."""
        return self.hidden_size * self.merge_height * self.merge_width


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The text model of one checkpoint, and its vision tower where it has one."""

    vocab_size: int
    hidden_size: int
    n_layers: int
    dense_intermediate_size: int
    first_moe_layer: int
    rms_norm_eps: float
    attn_res_block_size: int
    situ_beta: float
    situ_linear_beta: float
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    mla_layers: tuple[int, ...]
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    has_vision: bool
    vision: VisionConfig | None = None

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based KDA layers, ascending."""
        return tuple(layer for layer in range(self.n_layers) if layer not in self.mla_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based layers with routed experts, ascending."""
        return tuple(range(self.first_moe_layer, self.n_layers))

    def is_mla(self, layer: int) -> bool:
        """Whether `layer` (0-based) attends with MLA; otherwise KDA."""
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` (0-based) has routed experts; otherwise a dense MLP."""
        return layer >= self.first_moe_layer
