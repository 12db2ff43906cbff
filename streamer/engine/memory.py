"""How many experts fit in memory beside everything else. Knows sizes, not files.

The full ledger (`--memory`, cgroups of every kind, prefill scratch) is a later capability; this is the part that keeps
a run from being killed: what is available here and now, what must be held, and a refusal with the arithmetic.
"""

import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from streamer.config.errors import UsageError
from streamer.config.model import ModelConfig

GIB = 2**30
RESERVE_BYTES = 512 * 2**20  # interpreter, compiled kernels, activations of a prefill chunk
MAX_SEQUENCES = 64
ARENA_SHARE = 0.75  # of what is left: page cache, other programs and growth need the rest (caching.md §5)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by part, and the slots per layer that they leave room for."""

    available_bytes: int
    trunk_bytes: int
    state_bytes: int
    expert_bytes: int  # of one expert
    n_moe_layers: int
    slots_per_layer: int

    @property
    def arena_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots_per_layer * self.n_moe_layers * self.expert_bytes

    @property
    def max_sequences(self) -> int:
        """Sequences that may run together in what is left: at least one, at most MAX_SEQUENCES."""
        room = self.available_bytes - self.trunk_bytes - self.arena_bytes - RESERVE_BYTES
        return max(1, min(MAX_SEQUENCES, room // self.state_bytes))


def available_bytes() -> int:
    """Memory this process may still take: the least of MemAvailable, its cgroup (v2) and its address space limit."""
    free = psutil.virtual_memory().available
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and used is not None:
        free = min(free, limit - used)
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        free = min(free, address_space - psutil.Process().memory_info().vms)
    return max(free, 0)


def _cgroup_bytes(name: str) -> int | None:
    """A number of this process's cgroup, None where there is no limit or no cgroup v2."""
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        text = (Path("/sys/fs/cgroup") / group.lstrip("/") / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def state_bytes(config: ModelConfig, context_tokens: int) -> int:
    """Bytes of one sequence: KDA states (two while a prompt is read), convolution inputs, latents of the context."""
    kda, mla = config.kda, config.mla
    recurrent = kda.n_heads * kda.head_dim**2 * 4
    history = 3 * (kda.conv_kernel - 1) * kda.width * 4
    latents = mla.cache_width * context_tokens * 4
    return len(config.kda_layers) * (2 * recurrent + 2 * history) + len(config.mla_layers) * latents


def plan_memory(
    config: ModelConfig, trunk_bytes: int, expert_bytes: int, context_tokens: int, slots: int | None
) -> MemoryPlan:
    """Slots per layer: `slots` where given, else the whole pool or as much of it as fits.

    Raises UsageError with the arithmetic when the trunk, one sequence and one token's experts do not fit.
    """
    moe, n_layers = config.moe, len(config.moe_layers)
    available = available_bytes()
    states = state_bytes(config, context_tokens)
    if slots is not None and slots < moe.top_k:
        raise UsageError(
            f"--slots {slots}: one token needs {moe.top_k} experts in each layer; expected at least {moe.top_k}."
        )
    row = n_layers * expert_bytes  # one slot in every layer
    room = available - trunk_bytes - states - RESERVE_BYTES
    fitting = min(moe.n_experts, int(room * ARENA_SHARE) // row) if room > 0 else 0
    chosen = min(slots, moe.n_experts) if slots is not None else max(fitting, moe.top_k)
    if chosen * row > room:
        raise UsageError(
            f"Not enough memory: {available / GIB:.2f} GiB are available here, needed are\n"
            f"  {trunk_bytes / GIB:9.2f} GiB  trunk and head\n"
            f"  {states / GIB:9.2f} GiB  one sequence of {context_tokens:,} tokens\n"
            f"  {RESERVE_BYTES / GIB:9.2f} GiB  program, kernels, activations\n"
            f"  {chosen * row / GIB:9.2f} GiB  {chosen} expert slots in each of {n_layers} layers"
            f" (one token needs {moe.top_k})\n"
            "Lower --slots or --ctx-size, or use a machine with more memory."
        )
    return MemoryPlan(available, trunk_bytes, states, expert_bytes, n_layers, chosen)
