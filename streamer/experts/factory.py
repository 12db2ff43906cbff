"""Which source of experts a number of slots asks for. The model cannot tell them apart."""

from collections.abc import Callable, Sequence

from storage.reader import ExpertReader
from streamer.experts.resident import ResidentExperts
from streamer.experts.source import ExpertSource
from streamer.experts.streamed import SpanOf, StreamedExperts


def open_experts(
    spans: SpanOf,
    moe_layers: Sequence[int],
    n_experts: int,
    expert_bytes: int,
    slots_per_layer: int | None,
    reader: ExpertReader,
    progress: Callable[[int, int], None] | None = None,
) -> ExpertSource:
    """Return the whole pool in RAM where the slots hold it (or `slots_per_layer` is None), else a streamed source.

    The source owns the reader. `progress` is called with (bytes, bytes in all) while the source gets ready.
    Raises StorageError when memory or a read fails, ValueError for a number of slots below 1.
    """
    if slots_per_layer is None or slots_per_layer >= n_experts:
        return ResidentExperts(spans, moe_layers, n_experts, expert_bytes, reader, progress)
    return StreamedExperts(spans, moe_layers, n_experts, expert_bytes, slots_per_layer, reader, progress=progress)
