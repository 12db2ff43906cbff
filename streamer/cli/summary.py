"""The header line before a run and the summary line after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamer.engine.sampling import SamplingParams
    from streamer.engine.stats import RunStats
    from streamer.llm import LLM

GB = 1e9


def header(name: str, llm: LLM, params: SamplingParams, seed_drawn: bool, *more: str) -> str:
    """Return what is run and how, so that the run can be repeated."""
    from streamer.engine.threads import active_threads

    moe, threads = llm.config.moe, active_threads()
    memory = llm.memory
    parts = [
        name,
        f"trunk {memory.placement.format}{'' if memory.placement.format == 'bf16' else ' (lossy)'}",
        f"{memory.slots_per_layer} of {moe.n_experts} experts per layer in memory (one token needs {moe.top_k})",
        f"context {llm.context_tokens:,} tokens",
        sampling(params, seed_drawn),
        *more,
        f"{threads} thread{'s' if threads > 1 else ''}",
    ]
    return " | ".join(parts)


def sampling(params: SamplingParams, seed_drawn: bool) -> str:
    """Return the sampling parameters; those that are off are left out."""
    if params.temperature == 0:
        return "temperature 0 (greedy)"
    parts = [f"temperature {params.temperature:g}", f"top-p {params.top_p:g}"]
    parts += [f"top-k {params.top_k}"] if params.top_k else []
    parts += [f"min-p {params.min_p:g}"] if params.min_p else []
    parts.append(f"seed {params.seed}{' (drawn)' if seed_drawn else ''}")
    return ", ".join(parts)


def summary(n_tokens: int, stats: RunStats, *more: str) -> str:
    """Return tokens, speeds, hit rates and bytes; empty strings in `more` are left out."""
    parts = [f"{n_tokens:,} token{'' if n_tokens == 1 else 's'}{_speed(stats.decode_tokens_per_s if n_tokens else 0)}"]
    if stats.prefill_tokens:
        parts.append(f"prompt {stats.prefill_tokens:,}{_speed(stats.prefill_tokens_per_s)}")
    if stats.decode_hit_rate is not None:
        parts.append(f"experts found in memory {stats.decode_hit_rate:.1%}")
    if stats.prefill_hit_rate is not None:
        parts.append(f"{stats.prefill_hit_rate:.1%} for the prompt")
    parts.append(f"{stats.bytes_read / GB:.2f} GB read")
    if stats.useful_bytes or stats.wasted_bytes:
        parts.append(f"ahead {stats.useful_bytes / GB:.2f} GB right, {stats.wasted_bytes / GB:.2f} GB wrong")
    return " | ".join([*parts, *filter(None, more)])


def ending(finish_reason: str | None, stop_reason: int | str | None, max_tokens: int | None, context_full: bool) -> str:
    """Return why a text ends where it ends; a limit must not look like an end."""
    if finish_reason == "length":
        if context_full or max_tokens is None:
            return "stopped: the context is full (--ctx-size)"
        return f"stopped at --max-tokens {max_tokens:,}"
    if finish_reason == "cancelled":
        return "interrupted"
    return f"stopped at {stop_reason!r}" if isinstance(stop_reason, str) else "finished"


def speed(tokens_per_s: float) -> str:
    """Return '0.314 tokens/s', '12.5 tokens/s' or '1,290 tokens/s'."""
    return f"{tokens_per_s:,.0f} tokens/s" if tokens_per_s >= 100 else f"{tokens_per_s:.3g} tokens/s"


def _speed(tokens_per_s: float) -> str:
    return f" ({speed(tokens_per_s)})" if tokens_per_s else ""
