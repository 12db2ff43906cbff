"""The seams between the model and its weights: it cannot tell resident from streamed, nor pinned from streamed."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from streamer.experts.weights import HeadWeights, LayerWeights

ReadyExpert = tuple[int, np.ndarray]  # expert id, its bytes uint8[expert_bytes] in canonical order (storage.span)


@dataclass(slots=True)
class ExpertCounters:
    """What the source did so far. A lookup is one distinct expert of one layer in one step, counted against the
    cache as it stood before the step asked."""

    prefill_hits: int = 0
    prefill_misses: int = 0
    decode_hits: int = 0
    decode_misses: int = 0
    bytes_read: int = 0
    wait_s: float = 0.0  # time the consumer stood still for a read


class ExpertSource(Protocol):
    """Experts of one layer, one after another, in the order in which they become ready."""

    counters: ExpertCounters

    def open(self, layer: int, routing: np.ndarray, prefill: bool) -> AbstractContextManager[Iterator[ReadyExpert]]:
        """Serve the union of `routing` (int32 [rows, top_k]: expert ids, rows in step order, ranks descending in
        router weight): every distinct expert exactly once, in any order. Reads of all misses that have a slot are
        submitted on entry, in file-offset order. The bytes yielded are valid until the next one is asked for.
        Leaving the context early (cancel, error) abandons what was not read and leaves the cache whole.
        Raises storage.errors.StorageError with file and offset when a read fails.
        """
        ...

    def close(self) -> None:
        """Stop readers and give the memory back. Idempotent."""
        ...


class TrunkSource(Protocol):
    """Weights of one layer at a time."""

    def layer(self, layer: int) -> LayerWeights:
        """The layer's weights, valid until the next layer is asked for."""
        ...

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Embedding rows of token ids int [R] as float32 [R, D]; only these rows are read."""
        ...

    def head(self) -> HeadWeights:
        """Final norm and vocabulary projection."""
        ...
