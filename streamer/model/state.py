"""What one sequence remembers: KDA states and convolution inputs, MLA latents, and how many tokens are committed.

A step writes nothing that cannot be dropped (design §5). A short step (a decode step, a few drafted tokens) leaves the
committed KDA state alone and keeps a *journal* of its k, v, α, β; the next step applies the committed journal first.
A longer chunk writes its end state beside the start state. `commit` and `rollback` decide; layers that a cancelled
step never reached have nothing to drop. Both ways run the same operations in the same order, so the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kernels.delta_rule import advance
from streamer.config.model import KdaConfig, ModelConfig

JOURNAL_TOKENS = 8  # longest step that is journalled: a journal token is 1.6 % of a released state

_NO_STATE = np.empty((0, 1, 1), np.float32)


@dataclass(slots=True)
class Journal:
    """Inputs of the recurrence for tokens that the state does not contain yet. k, v, α [T, H, d], β [T, H], float32."""

    k: np.ndarray
    v: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(k, v, α, β)."""
        return self.k, self.v, self.alpha, self.beta

    def first(self, n_tokens: int) -> "Journal":
        """The first tokens, in memory of their own: slices of a batch would keep all of it alive."""
        return Journal(*(array[:n_tokens].copy() for array in self.arrays))


@dataclass(frozen=True, slots=True)
class _Step:
    """What a step leaves behind until it is committed: a journal, or the state after all of its tokens."""

    n_tokens: int
    recent: np.ndarray  # convolution inputs: with a journal [3, J-1+T, C], else the last of them [3, J-1, C]
    journal: Journal | None
    state: np.ndarray | None


class KdaState:
    """One KDA layer of one sequence; all float32. Letters: H heads, d head_dim, J convolution taps, C = H · d."""

    def __init__(self, config: KdaConfig) -> None:
        heads, d = config.n_heads, config.head_dim
        self.state = np.zeros((heads, d, d), np.float32)  # [H, key, value], without the committed journal
        self.history = np.zeros((3, config.conv_kernel - 1, config.width), np.float32)  # inputs before q, k, v conv
        self._journal: Journal | None = None  # committed, not yet applied
        self._step: _Step | None = None

    def advance(self, q: np.ndarray, journal: Journal, recent: np.ndarray) -> np.ndarray:
        """Outputs float32 [T, H, d] of the tokens in `journal` with queries `q` [T, H, d]; pending until commit.

        `recent` float32 [3, J-1+T, C]: the convolution inputs of the step, those before it in front.
        """
        done = self._journal or journal.first(0)
        n_tokens = q.shape[0]
        out = np.empty_like(q)
        short = n_tokens <= JOURNAL_TOKENS
        end = _NO_STATE if short else np.empty_like(self.state)
        advance(self.state, *done.arrays, q, *journal.arrays, out, end)
        self._journal = None  # it is in the state now, whatever becomes of this step
        if short:
            self._step = _Step(n_tokens, recent, journal.first(n_tokens), None)
        else:
            self._step = _Step(n_tokens, recent[:, n_tokens:].copy(), None, end)
        return out

    def commit(self, n_tokens: int) -> None:
        """Make the first tokens of the pending step part of the sequence; of a long step, all of them or none."""
        step = self._step
        if step is None:
            return  # the step never reached this layer, and nothing of it may be committed elsewhere
        if step.journal is not None:
            self.history = step.recent[:, n_tokens : n_tokens + self.history.shape[1]].copy()
            self._journal = step.journal.first(n_tokens)
        elif step.state is not None:
            assert n_tokens == step.n_tokens, "a step longer than the journal is committed whole"
            self.history, self.state = step.recent, step.state
        self._step = None

    def rollback(self) -> None:
        """Drop the pending step."""
        self._step = None


class MlaCache:
    """Latents of one MLA layer: float32 [capacity, latent + rope]. Rows past the committed length mean nothing.

    float32, not bf16: rounding the latents to bf16 would put every long-context logit about 1e-2 away from the
    definition; 55 KB a token is the price at released sizes.
    """

    def __init__(self, width: int, capacity_tokens: int) -> None:
        self.latents = np.empty((capacity_tokens, width), np.float32)  # pages are taken as tokens arrive


@dataclass(slots=True)
class SequenceState:
    """All layers of one sequence."""

    capacity_tokens: int
    length: int = 0  # committed tokens
    kda: dict[int, KdaState] = field(default_factory=dict)
    mla: dict[int, MlaCache] = field(default_factory=dict)

    @classmethod
    def empty(cls, config: ModelConfig, capacity_tokens: int) -> "SequenceState":
        """A sequence of no tokens with room for `capacity_tokens`."""
        width = config.mla.cache_width
        return cls(
            capacity_tokens,
            kda={layer: KdaState(config.kda) for layer in config.kda_layers},
            mla={layer: MlaCache(width, capacity_tokens) for layer in config.mla_layers},
        )

    def commit(self, n_tokens: int) -> None:
        """Take the first `n_tokens` of the step that just ran into the sequence.

        Fewer than it had, down to none, only of a step of at most JOURNAL_TOKENS: what verification of drafts needs.
        """
        for state in self.kda.values():
            state.commit(n_tokens)
        self.length += n_tokens

    def rollback(self) -> None:
        """Forget the step that just ran, wherever it stopped."""
        for state in self.kda.values():
            state.rollback()


LayerState = KdaState | MlaCache


class StateStore(Protocol):
    """The seam between the model and where states live: memory now, a directory for large batches."""

    def open(self, layer: int, sequences: Sequence[SequenceState]) -> AbstractContextManager[list[LayerState]]:
        """The layer's state of each sequence of a step, in order; what the layer does to them is kept on leaving."""
        ...


class MemoryStates:
    """States that live in memory with their sequences."""

    @contextmanager
    def open(self, layer: int, sequences: Sequence[SequenceState]) -> Iterator[list[LayerState]]:
        """See `StateStore.open`; there is nothing to fetch or to keep."""
        yield [sequence.kda[layer] if layer in sequence.kda else sequence.mla[layer] for sequence in sequences]
