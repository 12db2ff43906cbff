"""Run token ids through a checkpoint in a chosen way and collect every logit."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from storage.checkpoint import Checkpoint
from storage.direct_io import pread
from storage.reader import ExpertReader
from streamer.config.load import load_model_config
from streamer.config.tensors import expert_tensors, trunk_tensors
from streamer.experts.factory import open_experts
from streamer.experts.placement import TrunkPlacement
from streamer.experts.streamed import Slots
from streamer.experts.trunk import open_trunk
from streamer.model.batch import StepBatch
from streamer.model.forward import Model
from streamer.model.state import SequenceState


class Run:
    """A model on a checkpoint, with a given number of slots and a given way to read."""

    def __init__(
        self,
        directory: Path,
        slots: int | None = None,
        read=pread,
        staging: int = 0,
        speculation: int = 0,
        lookahead: int = 0,
        placement: TrunkPlacement | None = None,
        cache_directory: Path = Path("/nonexistent"),
    ) -> None:
        self.config = load_model_config([directory])
        experts = expert_tensors(self.config)
        self.checkpoint = Checkpoint.open([directory], trunk_tensors(self.config), experts)
        self.reader = ExpertReader(4, read=read)
        placement = placement or TrunkPlacement.all_pinned(self.config)
        self.trunk = open_trunk(self.checkpoint, self.config, placement, self.reader, cache_directory, poison=True)
        n_experts = self.config.moe.n_experts
        self.source = open_experts(
            self.checkpoint.expert_span,
            n_experts,
            experts.expert_bytes,
            Slots(dict.fromkeys(self.config.moe_layers, n_experts if slots is None else slots), staging, speculation),
            self.reader,
            lookahead=lookahead,
        )
        self.model = Model(self.config, self.trunk, self.source)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()
        self.trunk.close()
        self.reader.close()
        self.checkpoint.close()

    def state(self, capacity: int = 512) -> SequenceState:
        return SequenceState.empty(self.config, capacity)

    def logits(self, ids: Sequence[int], chunks: Sequence[int]) -> np.ndarray:
        """Logits float32 [len(ids), vocab]; the sizes in `chunks` are taken in turn."""
        state, parts, at, turn = self.state(), [], 0, 0
        while at < len(ids):
            part = list(ids[at : at + chunks[turn % len(chunks)]])
            parts.append(self.model.forward(StepBatch.of([(state, part)], all_logits=True)))
            state.commit(len(part))
            at, turn = at + len(part), turn + 1
        return np.concatenate(parts)

    def routing(self, ids: Sequence[int], chunk: int) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Logits, and the expert sets int32 [len(ids), k] of every layer."""
        seen: dict[int, list[np.ndarray]] = {}
        self.model.observer = lambda layer, experts, _: seen.setdefault(layer, []).append(experts.copy())
        logits = self.logits(ids, [chunk])
        self.model.observer = None
        return logits, {layer: np.concatenate(parts) for layer, parts in seen.items()}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two float32 arrays agree in every bit, the sign of zero included."""
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))
