"""What a run cost: tokens, seconds, lookups and bytes, as the difference between two moments of an engine."""

from dataclasses import dataclass, fields
from typing import Any

from streamer.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class RunStats:
    """Sums over some stretch of time. A lookup is one distinct expert of one layer in one step (caching.md: hits are
    counted against the cache as it stood before the step)."""

    prefill_tokens: int
    prefill_s: float
    decode_tokens: int
    decode_s: float
    prefill_hits: int
    prefill_misses: int
    decode_hits: int
    decode_misses: int
    bytes_read: int
    wait_s: float

    @classmethod
    def of(cls, engine: Engine) -> "RunStats":
        """Totals of an engine since it started."""
        stats, counters = engine.stats, engine.model.experts.counters
        return cls(
            stats.prefill_tokens,
            stats.prefill_s,
            stats.decode_tokens,
            stats.decode_s,
            counters.prefill_hits,
            counters.prefill_misses,
            counters.decode_hits,
            counters.decode_misses,
            counters.bytes_read,
            counters.wait_s,
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
    def decode_hit_rate(self) -> float | None:
        """Share of decode lookups served from memory; None when there were none."""
        return _rate(self.decode_hits, self.decode_misses)

    @property
    def prefill_hit_rate(self) -> float | None:
        """Share of prefill lookups served from memory; None when there were none."""
        return _rate(self.prefill_hits, self.prefill_misses)

    def to_dict(self) -> dict[str, Any]:
        """The sums and rates under their names, for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "prefill_hit_rate": self.prefill_hit_rate,
            "decode_hit_rate": self.decode_hit_rate,
        }


def _rate(hits: int, misses: int) -> float | None:
    return hits / (hits + misses) if hits + misses else None
