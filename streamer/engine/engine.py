"""The engine: schedule → forward → sample → commit. `step()` is public; everything else is a loop over it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from streamer.config.errors import UsageError
from streamer.config.model import ModelConfig
from streamer.engine.sampling import sample, token_logprobs
from streamer.engine.sequence import Sequence
from streamer.model.batch import StepBatch
from streamer.model.forward import Model
from streamer.model.state import SequenceState

LOGITS_CHUNK = 64


class Cancelled(Exception):  # noqa: N818 - not an error: somebody asked for it
    """The step was cancelled before it committed; its sequences are as they were."""


@dataclass(slots=True)
class StepStats:
    """Totals since the engine started."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Engine:
    """Runs sequences through the model, several at a time. One thread at a time may step it."""

    def __init__(self, model: Model, prefill_chunk: int) -> None:
        self.model = model
        self.prefill_chunk = prefill_chunk
        self.stats = StepStats()
        self.running: list[Sequence] = []
        self.on_layer: Callable[[int], None] | None = None
        self.on_logits: Callable[[Sequence, int, np.ndarray], None] | None = None  # (sequence, first position, [n, V])
        self.closed = False
        self._cancel = threading.Event()
        self._owner = threading.Lock()

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return self.model.config

    def new_state(self, capacity_tokens: int) -> SequenceState:
        """An empty sequence state."""
        return SequenceState.empty(self.config, capacity_tokens)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Own the engine for one request, or one batch of them; a cancel from before is forgotten.

        Raises UsageError when the model is closed, or when another request is open, in this thread or another: its
        sequences would otherwise be stepped by both.
        """
        if self.closed:
            raise UsageError("The model is closed: expected an open one. Load it again.")
        if not self._owner.acquire(blocking=False):
            raise UsageError(
                "The model is busy with another request. Finish it or close its iterator first; prompts that are to "
                "run together go into one generate() call."
            )
        self._cancel.clear()
        try:
            yield
        finally:
            self._owner.release()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence with at least one token to compute."""
        assert sequence.waiting >= 1
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or not. Its state stays with it."""
        if sequence in self.running:
            self.running.remove(sequence)

    def cancel(self) -> None:
        """Stop the step in progress before its next layer; safe from a signal handler or another thread."""
        self._cancel.set()

    def step(self) -> list[Sequence]:
        """Run one step; returns the sequences that got a token. Finished ones leave `running`.

        A decode row of every sequence with one waiting token, and one prefill chunk of the first that has more, go
        through together. Raises Cancelled, or what the forward raised, with every sequence rolled back.
        """
        parts = self._schedule()
        prefill = any(len(ids) > 1 for _, ids in parts)
        states = [(sequence.state, ids) for sequence, ids in parts]
        batch = StepBatch.of(states, all_logits=self.on_logits is not None, prefill=prefill)
        began = time.perf_counter()
        try:
            logits = self.model.forward(batch, self._tick)
        except BaseException:
            for sequence, _ in parts:
                sequence.state.rollback()
            raise
        took = time.perf_counter() - began
        self._count(parts, prefill, took)
        return self._commit(parts, batch, logits)

    def _schedule(self) -> list[tuple[Sequence, list[int]]]:
        parts, prefilling = [], False
        for sequence in self.running:
            start = sequence.state.length
            if sequence.waiting == 1:
                parts.append((sequence, sequence.tokens[start:]))
            elif not prefilling:
                prefilling = True
                # logits of every token are wide: a released vocabulary is 0.65 MB a token
                chunk = min(self.prefill_chunk, LOGITS_CHUNK) if self.on_logits else self.prefill_chunk
                parts.append((sequence, sequence.tokens[start : start + chunk]))
        return parts

    def _tick(self, layer: int) -> None:
        if self._cancel.is_set():
            # Spent only here: one that comes behind the last layer of a step stops the next step.
            self._cancel.clear()
            raise Cancelled
        if self.on_layer:
            self.on_layer(layer)

    def _count(self, parts: list[tuple[Sequence, list[int]]], prefill: bool, took: float) -> None:
        stats, tokens = self.stats, sum(len(ids) for _, ids in parts)
        stats.steps += 1
        if prefill:
            stats.prefill_tokens += tokens
            stats.prefill_s += took
        else:
            stats.decode_tokens += tokens
            stats.decode_s += took

    def _commit(self, parts: list[tuple[Sequence, list[int]]], batch: StepBatch, logits: np.ndarray) -> list[Sequence]:
        advanced = []
        for (sequence, ids), segment in zip(parts, batch.segments, strict=True):
            sequence.state.commit(len(ids))
            rows = np.flatnonzero((batch.logit_rows >= segment.start) & (batch.logit_rows < segment.stop))
            if self.on_logits:
                self.on_logits(sequence, sequence.state.length - len(ids), logits[rows])
            if sequence.waiting == 0:
                self._sample(sequence, logits[rows[-1]])
                advanced.append(sequence)
                if sequence.finish_reason:
                    self.remove(sequence)
        return advanced

    def _sample(self, sequence: Sequence, row: np.ndarray) -> None:
        token = sample(row, sequence.params, len(sequence.tokens), sequence.banned)
        if sequence.params.logprobs is not None:
            sequence.logprobs.append(token_logprobs(row, token, sequence.params.logprobs))
        sequence.take(token)
