"""Independent float64 oracle of the Kimi K3 text model, written from k3-spec §1 to §3 and from nothing else.

The whole sequence is computed at once: MLA non-absorbed under a full causal softmax, KDA token by token, no chunking,
no cache and no rounding anywhere. It shares no code with the engine on purpose; keep it that way.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

PREFIX = "language_model."
DTYPES = {"F32": "<f4", "BF16": "<u2", "U8": "u1"}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # §2.4, indexed by the nibble
GROUP = 32  # elements of a row under one scale byte
L2_EPS = 1e-6  # §3.3 step 3
ROUTER_EPS = 1e-20  # §3.5
REQUIRED = {  # the only text_config values that §3 describes
    "hidden_act": "situ",
    "tie_word_embeddings": False,
    "moe_layer_freq": 1,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
}


@dataclass(frozen=True, slots=True)
class Config:
    """The fields of config.json that the text forward pass reads (§1); `mla_layers` is 0-based."""

    layers: int
    hidden: int
    vocab: int
    block: int
    eps: float
    first_dense: int
    mla_layers: frozenset[int]
    mla_heads: int
    nope: int
    rope: int
    v_dim: int
    kv_lora: int
    kda_heads: int
    kda_dim: int
    conv_kernel: int
    gate_lower_bound: float
    experts: int
    top_k: int
    routed_scale: float
    gate_cap: float
    up_cap: float


@dataclass(slots=True)
class OracleResult:
    """One forward pass.

    logits: [T, vocab]. routing: MoE layer → expert ids used, [T, k], by descending selection score, ties to the lower
    id. taken: how many (layer, token) used the engine's set. differing: (layer, token) whose sets differ beyond the
    allowed gap. snapshots: B at the end, each [T, hidden]. sums: P after step 6 of every layer (§3.2), [T, hidden].
    """

    logits: Array
    routing: dict[int, Ints]
    taken: int
    differing: list[tuple[int, int]]
    snapshots: list[Array] = field(default_factory=list)
    sums: list[Array] = field(default_factory=list)


def read_config(path: Path) -> Config:
    """Read config.json; a missing key is a KeyError (§10.1), an unsupported value or layer partition a ValueError."""
    text = json.loads(path.read_text(encoding="utf-8"))["text_config"]
    linear = text["linear_attn_config"]
    wrong = {key: text[key] for key, value in REQUIRED.items() if text[key] != value}
    if wrong or linear["use_full_rank_gate"] is not True:
        raise ValueError(f"the specification does not describe {wrong or 'use_full_rank_gate = false'}")
    layers, full = text["num_hidden_layers"], linear["full_attn_layers"]
    if sorted([*full, *linear["kda_layers"]]) != list(range(1, layers + 1)):
        raise ValueError(f"full_attn_layers and kda_layers do not partition 1..{layers}")
    return Config(
        layers=layers,
        hidden=text["hidden_size"],
        vocab=text["vocab_size"],
        block=text["attn_res_block_size"],
        eps=text["rms_norm_eps"],
        first_dense=text["first_k_dense_replace"],
        mla_layers=frozenset(number - 1 for number in full),
        mla_heads=text["num_attention_heads"],
        nope=text["qk_nope_head_dim"],
        rope=text["qk_rope_head_dim"],
        v_dim=text["v_head_dim"],
        kv_lora=text["kv_lora_rank"],
        kda_heads=linear["num_heads"],
        kda_dim=linear["head_dim"],
        conv_kernel=linear["short_conv_kernel_size"],
        gate_lower_bound=linear["gate_lower_bound"],
        experts=text["num_experts"],
        top_k=text["num_experts_per_token"],
        routed_scale=text["routed_scaling_factor"],
        gate_cap=text["activation_situ_beta"],
        up_cap=text["activation_situ_linear_beta"],
    )


class Shards:
    """Every tensor of every *.safetensors file in a directory, memory-mapped (§2.2: u64 length, JSON, data)."""

    def __init__(self, directory: Path) -> None:
        self._entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            self._entries.update({name: (path, 8 + length, entry) for name, entry in header.items()})

    def raw(self, name: str, dtype: str | None = None) -> np.ndarray:
        """Return the stored bits of a tensor (uint16 for BF16); `dtype` is what the file must say, if given."""
        path, base, entry = self._entries[PREFIX + name]
        if dtype not in (None, entry["dtype"]):
            raise ValueError(f"{name} is {entry['dtype']}, not {dtype}")
        shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
        if end - start != math.prod(shape) * np.dtype(DTYPES[entry["dtype"]]).itemsize:
            raise ValueError(f"{name}: {end - start} bytes do not hold {shape}")
        return np.memmap(path, DTYPES[entry["dtype"]], mode="r", offset=base + start, shape=shape)

    def real(self, name: str) -> Array:
        """Return a BF16 or F32 tensor as float64."""
        bits = self.raw(name)
        if bits.dtype == np.uint8:
            raise ValueError(f"{name} is U8: a quantised tensor where a plain one was expected")
        return bf16(bits) if bits.dtype == np.uint16 else np.asarray(bits, np.float64)

    def mxfp4(self, name: str) -> Array:
        """Return `name`.weight_packed and .weight_scale decoded to float64."""
        return mxfp4(self.raw(f"{name}.weight_packed", "U8"), self.raw(f"{name}.weight_scale", "U8"))


def bf16(bits: np.ndarray) -> Array:
    """Decode bfloat16 bits: they are the upper half of a float32."""
    return (np.asarray(bits, np.uint32) << 16).view(np.float32).astype(np.float64)


def mxfp4(packed: np.ndarray, scale: np.ndarray) -> Array:
    """Decode MXFP4 (§2.4): byte j holds element 2j low, 2j+1 high; one E8M0 scale per 32 elements of a row."""
    rows, half = packed.shape
    if scale.shape != (rows, 2 * half // GROUP) or 2 * half % GROUP:
        raise ValueError(f"scales {scale.shape} do not fit {packed.shape} packed bytes")
    if np.any(scale == 255):
        raise ValueError("E8M0 scale byte 255 is NaN")
    values = np.empty((rows, 2 * half))
    values[:, 0::2] = FP4[packed & 15]
    values[:, 1::2] = FP4[packed >> 4]
    return values * np.repeat(np.ldexp(1.0, scale.astype(np.int64) - 127), GROUP, axis=1)


def sigmoid(x: Array) -> Array:
    """Logistic function without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def softmax(x: Array, axis: int) -> Array:
    """Softmax along `axis`; -inf entries get weight 0."""
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def rms(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis, eps inside the root (§3.0)."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def l2norm(x: Array) -> Array:
    """L2 normalisation over the last axis, eps inside the root (§3.3 step 3)."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def situ(g: Array, u: Array, gate_cap: float = 4.0, up_cap: float = 25.0) -> Array:
    """SiTU-GLU (§3.7): both factors are capped by tanh, the sigmoid takes the un-capped gate."""
    return gate_cap * np.tanh(g / gate_cap) * sigmoid(g) * (up_cap * np.tanh(u / up_cap))


def mix(snapshots: Sequence[Array], total: Array, gamma: Array, eps: float) -> Array:
    """AttnRes mix (§3.2): softmax over the snapshots and the running sum, summing the raw sources."""
    if not snapshots:
        return total
    sources = np.stack([*snapshots, total])  # [n+1, T, hidden]
    scores = rms(sources, gamma, eps).sum(axis=-1)
    return np.sum(softmax(scores, axis=0)[..., None] * sources, axis=0)


def causal_conv(u: Array, taps: Array) -> Array:
    """Depthwise causal convolution (§3.3 step 2): c[t] = Σ_j taps[:, j] · u[t-(K-1)+j], zeros before the start."""
    tokens, kernel = len(u), taps.shape[1]
    padded = np.concatenate([np.zeros((kernel - 1, u.shape[1])), u])
    return sum((taps[:, j] * padded[j : j + tokens] for j in range(kernel)), start=np.zeros(u.shape))


def kda_recurrence(q: Array, k: Array, v: Array, alpha: Array, beta: Array) -> Array:
    """Gated delta rule (§3.3 step 6) from a zero state: q, k, v, alpha [T, H, d], beta [T, H] → o [T, H, d]."""
    tokens, heads, dim = v.shape
    state = np.zeros((heads, k.shape[2], dim))  # [H, key, value]
    out = np.empty((tokens, heads, dim))
    for t in range(tokens):
        state = alpha[t][:, :, None] * state
        recalled = np.einsum("hkv,hk->hv", state, k[t])
        update = beta[t][:, None] * (v[t] - recalled)
        state = state + k[t][:, :, None] * update[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    return out


def select(
    selection: Array, top_k: int, engine: NDArray[np.integer[Any]] | None = None, gap: float = 1e-4
) -> tuple[Ints, NDArray[np.bool_], NDArray[np.bool_]]:
    """Choose the `top_k` largest selection scores of each token, ties to the lower id (§3.5).

    Return (ids [T, k] by descending score, taken [T], differing [T]). Where the engine's set is another one, it is
    taken if every expert that it leaves out beats every expert that it takes by less than `gap` at most, which implies
    that the cut itself is that close; otherwise the token is `differing` and keeps the oracle's own set.
    """
    ids = np.argsort(-selection, axis=1, kind="stable")[:, :top_k]
    nobody = np.zeros(len(selection), bool)
    if engine is None:
        return ids, nobody, nobody
    engine = np.asarray(engine, np.int64)
    if engine.shape != ids.shape or engine.min() < 0 or engine.max() >= selection.shape[1]:
        raise ValueError(f"the engine's sets {engine.shape} are not {ids.shape} ids below {selection.shape[1]}")
    theirs, own = np.zeros(selection.shape, bool), np.zeros(selection.shape, bool)
    np.put_along_axis(theirs, engine, values=True, axis=1)
    np.put_along_axis(own, ids, values=True, axis=1)
    if np.any(theirs.sum(axis=1) != top_k):
        raise ValueError("the engine's sets have repeated ids")
    other = np.any(theirs != own, axis=1)
    left_out = np.where(theirs, -np.inf, selection).max(axis=1)
    lowest = np.where(theirs, selection, np.inf).min(axis=1)
    taken = other & (left_out - lowest < gap)
    theirs_ordered = np.argsort(-np.where(theirs, selection, -np.inf), axis=1, kind="stable")[:, :top_k]
    return np.where(taken[:, None], theirs_ordered, ids), taken, other & ~taken


class Oracle:
    """The text model of one checkpoint directory, in float64; plain weights are cached, experts decoded on use.

    `mla_eps` is ε_m of §3.4: the default of the released code, 1e-6, not rms_norm_eps.
    """

    def __init__(self, directory: Path, mla_eps: float = 1e-6) -> None:
        self.config = read_config(directory / "config.json")
        self.shards = Shards(directory)
        self.mla_eps = mla_eps
        self._cache: dict[str, Array] = {}

    def weight(self, name: str) -> Array:
        """Return a plain tensor, `language_model.` and `.weight` understood."""
        if name not in self._cache:
            suffix = "" if name.endswith(("A_log", "dt_bias", "e_score_correction_bias")) else ".weight"
            self._cache[name] = self.shards.real(name + suffix)
        return self._cache[name]

    def linear(self, x: Array, name: str) -> Array:
        """Return y = x Wᵀ; no layer has a bias."""
        return x @ self.weight(name).T

    def forward(
        self,
        ids: Sequence[int] | NDArray[np.integer[Any]],
        expert_sets: Mapping[int, NDArray[np.integer[Any]]] | None = None,
        gap: float = 1e-4,
    ) -> OracleResult:
        """Run §3.2 over a whole sequence; `expert_sets` (layer → [T, k]) are used where the choice is a near-tie."""
        cfg, sets = self.config, expert_sets or {}
        tokens = np.asarray(ids, np.int64)
        if tokens.ndim != 1 or not len(tokens) or tokens.min() < 0 or tokens.max() >= cfg.vocab:
            raise ValueError(f"ids must be a non-empty list within 0..{cfg.vocab - 1}")
        result = OracleResult(np.empty(0), {}, 0, [])
        if not set(sets) <= set(range(cfg.first_dense, cfg.layers)):
            raise ValueError(f"expert_sets names layers {sorted(sets)}, not all of them MoE")
        total = self.weight("model.embed_tokens")[tokens]
        for layer in range(cfg.layers):
            name = f"model.layers.{layer}"
            h = mix(result.snapshots, total, self.gamma(f"{name}.self_attention_res"), cfg.eps)
            restart = layer % cfg.block == 0
            if restart:
                result.snapshots.append(total)
            a = self.attention(rms(h, self.weight(f"{name}.input_layernorm"), cfg.eps), layer)
            total = a if restart else total + a
            m = mix(result.snapshots, total, self.gamma(f"{name}.mlp_res"), cfg.eps)
            x = rms(m, self.weight(f"{name}.post_attention_layernorm"), cfg.eps)
            total = total + self.ffn(x, layer, result, sets.get(layer), gap)
            result.sums.append(total)
        h = mix(result.snapshots, total, self.gamma("model.output_attn_res"), cfg.eps)
        result.logits = self.linear(rms(h, self.weight("model.norm"), cfg.eps), "lm_head")
        return result

    def gamma(self, name: str) -> Array:
        """Return γ = res_norm ⊙ res_proj[0] (§3.2)."""
        return self.weight(f"{name}_norm") * self.weight(f"{name}_proj")[0]

    def attention(self, x: Array, layer: int) -> Array:
        """Return Attn_L(x), x already normalised."""
        name = f"model.layers.{layer}.self_attn"
        return self.mla(x, name) if layer in self.config.mla_layers else self.kda(x, name)

    def kda(self, x: Array, name: str) -> Array:
        """KDA layer (§3.3) over a whole sequence [T, hidden]."""
        cfg = self.config
        shape = (len(x), cfg.kda_heads, cfg.kda_dim)

        def branch(which: str) -> Array:
            taps = self.weight(f"{name}.{which}_conv1d")
            if taps.shape[1:] != (1, cfg.conv_kernel):
                raise ValueError(f"{name}.{which}_conv1d is {taps.shape}")
            c = causal_conv(self.linear(x, f"{name}.{which}_proj"), taps[:, 0, :])
            return (c * sigmoid(c)).reshape(shape)

        q = l2norm(branch("q")) * cfg.kda_dim**-0.5
        k, v = l2norm(branch("k")), branch("v")
        beta = sigmoid(self.linear(x, f"{name}.b_proj"))
        z = self.linear(self.linear(x, f"{name}.f_a_proj"), f"{name}.f_b_proj") + self.weight(f"{name}.dt_bias")
        rate = np.exp(self.weight(f"{name}.A_log")[: cfg.kda_heads])  # per head; the rest is padding
        g = cfg.gate_lower_bound * sigmoid(rate[:, None] * z.reshape(shape))
        o = kda_recurrence(q, k, v, np.exp(g), beta)
        y = rms(o, self.weight(f"{name}.o_norm"), cfg.eps).reshape(len(x), -1)
        return self.linear(y * sigmoid(self.linear(x, f"{name}.g_proj")), f"{name}.o_proj")

    def mla(self, x: Array, name: str) -> Array:
        """Gated MLA layer (§3.4), non-absorbed; the "rope" part is never rotated."""
        cfg, tokens = self.config, len(x)
        latent_q = rms(self.linear(x, f"{name}.q_a_proj"), self.weight(f"{name}.q_a_layernorm"), self.mla_eps)
        q = self.linear(latent_q, f"{name}.q_b_proj").reshape(tokens, cfg.mla_heads, cfg.nope + cfg.rope)
        c = self.linear(x, f"{name}.kv_a_proj_with_mqa")
        latent = rms(c[:, : cfg.kv_lora], self.weight(f"{name}.kv_a_layernorm"), self.mla_eps)
        k_rope = c[:, cfg.kv_lora :]
        kv = self.linear(latent, f"{name}.kv_b_proj").reshape(tokens, cfg.mla_heads, cfg.nope + cfg.v_dim)
        future = np.triu(np.ones((tokens, tokens), bool), 1)
        out = np.empty((tokens, cfg.mla_heads, cfg.v_dim))
        for head in range(cfg.mla_heads):
            scores = q[:, head, : cfg.nope] @ kv[:, head, : cfg.nope].T + q[:, head, cfg.nope :] @ k_rope.T
            scores = np.where(future, -np.inf, scores * (cfg.nope + cfg.rope) ** -0.5)
            out[:, head] = softmax(scores, axis=1) @ kv[:, head, cfg.nope :]
        gate = sigmoid(self.linear(x, f"{name}.g_proj"))
        return self.linear(out.reshape(tokens, -1) * gate, f"{name}.o_proj")

    def ffn(self, x: Array, layer: int, result: OracleResult, engine: np.ndarray | None, gap: float) -> Array:
        """Return FFN_L(x), x already normalised: dense below first_k_dense_replace, LatentMoE (§3.6) from there on."""
        name = f"model.layers.{layer}"
        if layer < self.config.first_dense:
            return self.mlp(x, f"{name}.mlp")
        name += ".block_sparse_moe"
        chosen, weights, taken, differing = self.route(x, name, engine, gap)
        result.routing[layer] = chosen
        result.taken += int(taken.sum())
        result.differing += [(layer, int(token)) for token in np.flatnonzero(differing)]
        u = self.experts(self.linear(x, f"{name}.routed_expert_down_proj"), chosen, weights, name)
        u = rms(u, self.weight(f"{name}.routed_expert_norm"), self.config.eps)
        return self.linear(u, f"{name}.routed_expert_up_proj") + self.mlp(x, f"{name}.shared_experts")

    def mlp(self, x: Array, name: str) -> Array:
        """Dense or shared SiTU-GLU MLP at full width (§3.7)."""
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(situ(gate, up, self.config.gate_cap, self.config.up_cap), f"{name}.down_proj")

    def route(
        self, x: Array, name: str, engine: np.ndarray | None, gap: float
    ) -> tuple[Ints, Array, NDArray[np.bool_], NDArray[np.bool_]]:
        """Router (§3.5) on the full-width input; the bias selects and is not part of the weights."""
        scores = sigmoid(self.linear(x, f"{name}.gate"))
        selection = scores + self.weight(f"{name}.gate.e_score_correction_bias")
        chosen, taken, differing = select(selection, self.config.top_k, engine, gap)
        weights = np.take_along_axis(scores, chosen, axis=1)
        weights = weights / (weights.sum(axis=1, keepdims=True) + ROUTER_EPS) * self.config.routed_scale
        return chosen, weights, taken, differing

    def experts(self, z: Array, chosen: Ints, weights: Array, name: str) -> Array:
        """Return Σ w_e · W2_e situ(W1_e z, W3_e z) (§3.6), one decoded expert in memory at a time."""
        u = np.zeros_like(z)
        for expert in np.unique(chosen):
            rows, slots = np.nonzero(chosen == expert)
            w1, w2, w3 = (self.shards.mxfp4(f"{name}.experts.{expert}.{part}") for part in ("w1", "w2", "w3"))
            hidden = situ(z[rows] @ w1.T, z[rows] @ w3.T, self.config.gate_cap, self.config.up_cap)
            u[rows] += weights[rows, slots][:, None] * (hidden @ w2.T)
        return u
