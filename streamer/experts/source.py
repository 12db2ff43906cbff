"""The seams between the model and its weights: it cannot tell resident from streamed, nor pinned from streamed."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from streamer.experts.weights import HeadWeights, LayerWeights, RouterWeights

ReadyExpert = tuple[int, np.ndarray]  # expert id, its bytes uint8[expert_bytes] in canonical order (storage.span)


@dataclass(slots=True)
class ExpertCounters:
    """What the source did so far. A lookup is one distinct expert of one layer in one step, counted against the
    cache as it stood before the step asked: a hit was there, a predicted one was brought by speculation."""

    prefill_hits: int = 0
    prefill_misses: int = 0
    decode_hits: int = 0
    decode_predicted: int = 0
    decode_misses: int = 0
    demand_bytes: int = 0
    useful_bytes: int = 0  # read by speculation, and wanted
    wasted_bytes: int = 0  # read by speculation, and not wanted
    wait_s: float = 0.0  # time the consumer stood still for a read

    @property
    def bytes_read(self) -> int:
        """Bytes of experts read for whatever reason."""
        return self.demand_bytes + self.useful_bytes + self.wasted_bytes


class ExpertSource(Protocol):
    """Experts of one layer, group after group, in the order in which they become ready."""

    @property
    def counters(self) -> ExpertCounters:
        """Totals since the source was made."""
        ...

    def open(
        self, layer: int, routing: np.ndarray, prefill: bool
    ) -> AbstractContextManager[Iterator[list[ReadyExpert]]]:
        """Serve the union of `routing` (int32 [rows, top_k]: expert ids, rows in step order, ranks descending in
        router weight): every distinct expert exactly once, in any order, in groups of those that are ready together.
        Reads of all misses that have a slot are submitted on entry, in file-offset order. The bytes of a group are
        valid until the next one is asked for. Leaving the context early (cancel, error) abandons what was not read
        and leaves the cache whole. Raises storage.errors.StorageError with file and offset when a read fails.
        """
        ...

    def ahead(self, layer: int) -> tuple[int, ...]:
        """Later layers whose routing is worth predicting while `layer` is computed, the nearest first."""
        ...

    def predict(self, layer: int, routing: np.ndarray) -> None:
        """Take `routing` (int32 [rows, top_k], as in `open`) as a prediction of what `layer` will ask for next, and
        read from it what promises to pay, behind every read that is wanted for certain."""
        ...

    def close(self) -> None:
        """Stop readers and give the memory back. Idempotent."""
        ...


class TrunkSource(Protocol):
    """Weights of one layer at a time."""

    def layer(self, layer: int) -> LayerWeights:
        """The layer's weights, valid until the next layer is asked for."""
        ...

    def router(self, layer: int) -> RouterWeights | None:
        """The router of a MoE layer, whichever layer is at work; None where it is not held in memory."""
        ...

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Embedding rows of token ids int [R] as float32 [R, D]; only these rows are read."""
        ...

    def head(self) -> HeadWeights:
        """Final norm and vocabulary projection."""
        ...
