"""Which source of experts the slots ask for. The model cannot tell them apart."""

from collections.abc import Callable

from cache_policy.eviction.policy import EvictionPolicy
from storage.reader import ExpertReader
from streamer.experts.resident import ResidentExperts
from streamer.experts.source import ExpertSource
from streamer.experts.streamed import Slots, SpanOf, StreamedExperts


def open_experts(
    spans: SpanOf,
    n_experts: int,
    expert_bytes: int,
    slots: Slots,
    reader: ExpertReader,
    policy: EvictionPolicy | None = None,
    lookahead: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ExpertSource:
    """Return the whole pool in RAM where every layer's quota holds it, else a streamed source.

    The reader stays the caller's, who closes it after the source. `progress` is called with (bytes, bytes in all)
    while the source gets ready. Raises StorageError when memory or a read fails, ValueError when a layer has no slot.
    """
    if all(quota >= n_experts for quota in slots.quotas.values()):
        return ResidentExperts(spans, tuple(slots.quotas), n_experts, expert_bytes, reader, progress)
    return StreamedExperts(
        spans, n_experts, expert_bytes, slots, reader, policy, lookahead=lookahead, progress=progress
    )
