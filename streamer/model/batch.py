"""The rows of one step. Ragged: a prefill chunk of one sequence and decode steps of others go through together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamer.model.state import SequenceState


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows start..stop of a batch: consecutive tokens of one sequence, the first at position `state.length`."""

    state: SequenceState
    start: int
    stop: int

    @property
    def position(self) -> int:
        """Absolute position of the first row."""
        return self.state.length


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step of the engine."""

    tokens: np.ndarray  # int64 [R]
    segments: tuple[Segment, ...]
    logit_rows: np.ndarray  # int64 [M]: rows whose logits are wanted
    prefill: bool  # whether any segment reads a prompt: counted apart by the experts' source

    @classmethod
    def of(
        cls, parts: Sequence[tuple[SequenceState, Sequence[int]]], *, all_logits: bool = False, prefill: bool = False
    ) -> "StepBatch":
        """A batch of (state, next tokens) pairs, with logits of each one's last token, or of every token."""
        segments: list[Segment] = []
        tokens: list[int] = []
        for state, ids in parts:
            segments.append(Segment(state, len(tokens), len(tokens) + len(ids)))
            tokens.extend(ids)
        last = np.array([segment.stop - 1 for segment in segments], np.int64)
        return cls(
            np.array(tokens, np.int64),
            tuple(segments),
            np.arange(len(tokens), dtype=np.int64) if all_logits else last,
            prefill,
        )
