"""What a run cost: tokens, seconds, lookups and bytes, as the difference between two moments of an engine."""

import resource
from dataclasses import dataclass, fields
from typing import Any

from streamer.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class RunStats:
    """Sums over some stretch of time. A lookup is one distinct expert of one layer in one step (caching.md: hits are
    counted against the cache as it stood before the step). Seconds by part are of prefill and decode together;
    `experts_s` includes `wait_s`, the time spent waiting for expert reads."""

    prefill_tokens: int
    prefill_s: float
    decode_tokens: int
    decode_s: float
    prefill_hits: int
    prefill_misses: int
    decode_hits: int
    decode_predicted: int
    decode_misses: int
    demand_bytes: int
    useful_bytes: int
    wasted_bytes: int
    wait_s: float
    attention_s: float
    router_s: float
    shared_s: float
    experts_s: float
    head_s: float
    major_faults: int  # pages that had to come back from a drive: a rise means that the budget is too high

    @classmethod
    def of(cls, engine: Engine) -> "RunStats":
        """Totals of an engine since it started."""
        stats, counters, parts = engine.stats, engine.model.experts.counters, engine.model.times.seconds()
        return cls(
            prefill_tokens=stats.prefill_tokens,
            prefill_s=stats.prefill_s,
            decode_tokens=stats.decode_tokens,
            decode_s=stats.decode_s,
            prefill_hits=counters.prefill_hits,
            prefill_misses=counters.prefill_misses,
            decode_hits=counters.decode_hits,
            decode_predicted=counters.decode_predicted,
            decode_misses=counters.decode_misses,
            demand_bytes=counters.demand_bytes,
            useful_bytes=counters.useful_bytes,
            wasted_bytes=counters.wasted_bytes,
            wait_s=counters.wait_s,
            major_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
            **{f"{part}_s": seconds for part, seconds in parts.items()},
        )

    def __sub__(self, earlier: "RunStats") -> "RunStats":
        return RunStats(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second; 0 when there were none."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Generated tokens a second; 0 when there were none."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def bytes_read(self) -> int:
        """Bytes of experts read for whatever reason."""
        return self.demand_bytes + self.useful_bytes + self.wasted_bytes

    @property
    def decode_hit_rate(self) -> float | None:
        """Share of decode lookups that were in memory before their step; None when there were none."""
        return _rate(self.decode_hits, self.decode_misses + self.decode_predicted)

    @property
    def prefill_hit_rate(self) -> float | None:
        """Share of prefill lookups served from memory; None when there were none."""
        return _rate(self.prefill_hits, self.prefill_misses)

    def to_dict(self) -> dict[str, Any]:
        """The sums and rates under their names, for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {
            "bytes_read": self.bytes_read,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "prefill_hit_rate": self.prefill_hit_rate,
            "decode_hit_rate": self.decode_hit_rate,
        }


def _rate(hits: int, misses: int) -> float | None:
    return hits / (hits + misses) if hits + misses else None
