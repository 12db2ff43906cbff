"""The memory ledger: what a run holds, computed before anything is allocated (design §7). Knows sizes, not files.

Order of spending: the program, one sequence with its context, scratch, then the trunk (a byte of it held saves a byte
read per token), then one token's experts in every layer, then more experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from storage.arena import slot_bytes
from streamer.config.errors import UsageError
from streamer.config.model import ModelConfig
from streamer.config.options import EngineOptions, MemoryRequest
from streamer.engine.limits import MemoryLimits
from streamer.experts.placement import (
    RING_BYTES,
    TrunkFormat,
    TrunkPlacement,
    always_pinned_bytes,
    pinned_bytes,
    place_trunk,
    smallest_ring,
)
from streamer.experts.streamed import Slots

GIB = 2**30
PROGRAM_BYTES = 512 * 2**20  # Python, numba and its compiler while kernels are compiled: 394 MB measured
AUTO_SHARE = 0.75  # the rest is for page cache, other programs and growth (caching.md §5: the paging cliff)
RESERVE_SHARE = 0.02  # page tables, allocator slack
CHUNKS = (2048, 1024, 512, 256, 128, 64, 32, 16)
CHUNK_SHARE = 0.1  # of the budget, for the scratch of a prefill chunk
MAX_SEQUENCES = 64
SEQUENCES_SHARE = 0.02  # of the budget, for the states of further sequences
STAGING_TOKENS = 2  # staging holds the experts of this many tokens of one layer


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the ledger."""

    name: str
    nbytes: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The ledger of one run. The parts and `unused_bytes` add up to `budget_bytes`."""

    budget_bytes: int
    budget_source: str
    parts: tuple[Part, ...]
    unused_reason: str
    placement: TrunkPlacement
    slots: Slots
    prefill_chunk: int
    max_sequences: int

    @property
    def planned_bytes(self) -> int:
        """What all parts take together."""
        return sum(part.nbytes for part in self.parts)

    @property
    def unused_bytes(self) -> int:
        """What no part asks for."""
        return self.budget_bytes - self.planned_bytes

    @property
    def slots_per_layer(self) -> int:
        """Experts of a layer that stay in memory; of the poorest layer where they differ."""
        return min(self.slots.quotas.values())


def kda_state_bytes(config: ModelConfig) -> int:
    """KDA states and convolution inputs of one sequence, float32 (k3-spec §4)."""
    kda = config.kda
    recurrent = kda.n_heads * kda.head_dim**2 * 4
    history = 3 * (kda.conv_kernel - 1) * kda.width * 4
    return len(config.kda_layers) * (recurrent + history)


def latent_bytes(config: ModelConfig, context_tokens: int) -> int:
    """MLA latents of one sequence, float32."""
    return len(config.mla_layers) * config.mla.cache_width * context_tokens * 4


def scratch_bytes(config: ModelConfig, chunk: int) -> int:
    """Activations of `chunk` tokens on their way through the widest layer."""
    kda, mla, moe = config.kda, config.mla, config.moe
    planes = -(-config.n_layers // config.attn_res_block_size) + 1 + 4  # snapshots, running sum, mixes and norms
    attention = max(12 * kda.width, 2 * mla.n_heads * mla.qk_head_dim + 3 * mla.n_heads * mla.v_head_dim)
    experts = (moe.top_k + 3) * moe.latent_size + 4 * moe.shared_intermediate_size + 2 * moe.n_experts
    dense = 3 * config.dense_intermediate_size
    return chunk * 4 * (planes * config.hidden_size + max(attention, experts, dense)) + 4 * 4 * config.vocab_size


def budget_bytes(request: MemoryRequest, limits: MemoryLimits) -> tuple[int, str]:
    """The budget in bytes, and where it comes from. Raises UsageError where it is more than there is."""
    total, available = limits.total_bytes, limits.available_bytes
    if request.nbytes is None and request.share is None:
        chosen = min(int(total * AUTO_SHARE), int(available * (1 - RESERVE_SHARE)))
        return chosen, f"{AUTO_SHARE:.0%} of {_gib(total)} on {limits.bound}, or what is free of it"
    chosen = request.nbytes if request.nbytes is not None else int(total * (request.share or 0))
    if chosen > available:
        raise UsageError(
            f"--memory {request.text}: {_gib(chosen)} are more than the {_gib(available)} that are free of"
            f" {_gib(total)} on {limits.bound}. Ask for less, or close other programs."
        )
    source = f"--memory {request.text}"
    return chosen, source if request.share is None else f"{source} of {_gib(total)} on {limits.bound}"


def plan_memory(
    config: ModelConfig, expert_bytes: int, context_tokens: int, options: EngineOptions, limits: MemoryLimits
) -> MemoryPlan:
    """The ledger of a run with `options`. Raises UsageError with the arithmetic where the least does not fit."""
    budget, source = budget_bytes(MemoryRequest.parse(options.memory), limits)
    chunk = options.prefill_chunk or _chunk(config, budget)
    sequences = _sequences(config, budget, context_tokens)
    fixed = tuple(_fixed(config, budget, context_tokens, min(chunk, context_tokens), sequences))
    room = budget - sum(part.nbytes for part in fixed)
    slot = slot_bytes(expert_bytes)
    placement, slots = _spend(config, options, room, slot)
    trunk = _trunk_part(config, placement)
    arena = Part("expert slots", slots.total * slot, _slots_detail(config, slots))
    parts = (*fixed, trunk, arena)
    plan = MemoryPlan(budget, source, parts, _unused(config, slots, options), placement, slots, chunk, sequences)
    if plan.unused_bytes < 0:
        raise UsageError(_refusal(plan))
    return plan


def _chunk(config: ModelConfig, budget: int) -> int:
    """As many prompt tokens together as a share of the budget has room for: each expert is read once a chunk."""
    return next((c for c in CHUNKS if scratch_bytes(config, c) <= budget * CHUNK_SHARE), CHUNKS[-1])


def _sequences(config: ModelConfig, budget: int, context_tokens: int) -> int:
    each = kda_state_bytes(config) + latent_bytes(config, context_tokens)
    return max(1, min(MAX_SEQUENCES, int(budget * SEQUENCES_SHARE) // each))


def _fixed(config: ModelConfig, budget: int, context_tokens: int, chunk: int, sequences: int) -> Iterator[Part]:
    """What every run needs, whatever is left for weights."""
    tokens = f"{sequences} × {context_tokens:,} tokens" if sequences > 1 else f"{context_tokens:,} tokens"
    kda = config.kda
    journal = len(config.kda_layers) * kda.n_heads * (3 * kda.head_dim + 1) * 4
    yield Part("program", PROGRAM_BYTES, "Python, compiled kernels")
    yield Part("reserve", int(budget * RESERVE_SHARE), f"{RESERVE_SHARE:.0%} of the budget")
    yield Part(
        "KDA states",
        (sequences + 1) * kda_state_bytes(config) + 2 * sequences * journal,
        f"{sequences} sequence{'s' if sequences > 1 else ''}, and one copy while a prompt is read",
    )
    yield Part("MLA latents", sequences * latent_bytes(config, context_tokens), tokens)
    yield Part("scratch", scratch_bytes(config, chunk), f"{chunk:,} prompt tokens together")


def _spend(config: ModelConfig, options: EngineOptions, room: int, slot: int) -> tuple[TrunkPlacement, Slots]:
    """Trunk first, then experts. Where nothing fits, the least there can be, for the refusal's arithmetic."""
    formats: tuple[TrunkFormat, ...] = ("bf16", "int8")
    if options.trunk != "auto":
        formats = (options.trunk,)  # type: ignore[assignment]  # checked by EngineOptions
    n_layers, top_k = len(config.moe_layers), config.moe.top_k
    wanted = (options.slots or top_k) * n_layers
    if options.trunk == "auto":
        whole = pinned_bytes(config, TrunkPlacement.all_pinned(config, "bf16"))
        formats = ("bf16",) if whole + wanted * slot <= room else ("int8",)
    least_slots = options.slots * n_layers if options.slots else 0
    least_slots += min(STAGING_TOKENS * top_k, config.moe.n_experts)
    placement = _place(config, formats[0], room - least_slots * slot, options.prefetch)
    total = (room - pinned_bytes(config, placement)) // slot
    return placement, _share_out(config, total, options)


def _place(config: ModelConfig, trunk_format: TrunkFormat, room: int, prefetch: bool) -> TrunkPlacement:
    least = smallest_ring(config, trunk_format)
    for ring, routers in [(max(RING_BYTES, least), prefetch), (max(RING_BYTES, least), False), (least, False)]:
        placement = place_trunk(config, trunk_format, room, ring, routers)
        if placement is not None:
            return placement
    return TrunkPlacement.all_streamed(trunk_format, least)


def _share_out(config: ModelConfig, total: int, options: EngineOptions) -> Slots:
    """Quotas and staging out of `total` slots; what does not divide goes to the last layers, which reuse most."""
    layers, moe = config.moe_layers, config.moe
    least = min(STAGING_TOKENS * moe.top_k, moe.n_experts)
    if options.slots:
        quotas = dict.fromkeys(layers, min(options.slots, moe.n_experts))
    elif total >= len(layers) * moe.n_experts:
        quotas = dict.fromkeys(layers, moe.n_experts)
    else:
        each, more = divmod(max(total - least, 0), len(layers))
        first_richer = len(layers) - more
        quotas = {layer: each + (index >= first_richer) for index, layer in enumerate(layers)}
    smallest = min(quotas.values())
    if smallest >= moe.n_experts:
        return Slots(quotas)
    if smallest == 0:
        quotas = dict.fromkeys(layers, 0)  # fewer than one slot a layer: all of them serve whatever comes
        least = max(least, total)
    staging = max(least, 1)
    demand = max(moe.top_k - smallest, 1)
    return Slots(quotas, staging, max(staging - demand, 0) if options.prefetch else 0)


def _trunk_part(config: ModelConfig, placement: TrunkPlacement) -> Part:
    nbytes, n_pinned = pinned_bytes(config, placement), len(placement.pinned_layers)
    if n_pinned == config.n_layers and placement.head_pinned:
        return Part(f"trunk {placement.format}", nbytes, "all of it held")
    head = "head held" if placement.head_pinned else "head streamed"
    vectors = always_pinned_bytes(config, placement.format)
    detail = f"{n_pinned} of {config.n_layers} layers held, {head}, vectors {_gib(vectors)}"
    return Part(f"trunk {placement.format}", nbytes, f"{detail}, the rest streams through {_gib(placement.ring_bytes)}")


def _slots_detail(config: ModelConfig, slots: Slots) -> str:
    low, high = min(slots.quotas.values()), max(slots.quotas.values())
    each = f"{low}" if low == high else f"{low} to {high}"
    staged = f", {slots.staging} for staging" if slots.staging else ""
    return f"{each} of {config.moe.n_experts} in each of {len(slots.quotas)} layers{staged}"


def _unused(config: ModelConfig, slots: Slots, options: EngineOptions) -> str:
    if min(slots.quotas.values()) >= config.moe.n_experts:
        return "every expert is in memory"
    return f"--slots {options.slots} asks for no more" if options.slots else "less than one expert slot"


def _refusal(plan: MemoryPlan) -> str:
    lines = [f"  {part.nbytes / GIB:9.2f} GiB  {part.name}: {part.detail}" for part in plan.parts]
    return "\n".join(
        [
            f"Not enough memory: the budget is {_gib(plan.budget_bytes)} ({plan.budget_source}); the least needed is",
            *lines,
            f"  {plan.planned_bytes / GIB:9.2f} GiB  together",
            "Raise --memory, or lower --ctx-size, --prefill-chunk or --slots.",
        ]
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
