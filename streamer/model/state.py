"""What one sequence remembers: KDA states and convolution inputs, MLA latents, and how many tokens are committed.

A step writes nothing that cannot be dropped (design §5). A short step (a decode step, a few drafted tokens) leaves the
committed KDA state alone and keeps a *journal* of its k, v, α, β; the next step applies the committed journal first.
A longer chunk writes its end state beside the start state. `commit` and `rollback` decide; layers that a cancelled
step never reached have nothing to drop. Both ways run the same operations in the same order, so the same bits.
"""

from dataclasses import dataclass, field

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

    @classmethod
    def of_no_tokens(cls, like: "Journal") -> "Journal":
        """An empty journal with the heads and widths of another."""
        return cls(*(array[:0] for array in like.arrays))

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(k, v, α, β)."""
        return self.k, self.v, self.alpha, self.beta

    def copy(self) -> "Journal":
        """The same tokens in memory of their own."""
        return Journal(*(array.copy() for array in self.arrays))


class KdaState:
    """One KDA layer of one sequence; all float32. Letters: H heads, d head_dim, J convolution taps, C = H · d."""

    def __init__(self, config: KdaConfig) -> None:
        heads, d = config.n_heads, config.head_dim
        self.state = np.zeros((heads, d, d), np.float32)  # [H, key, value], without the committed journal
        self.history = np.zeros((3, config.conv_kernel - 1, config.width), np.float32)  # inputs before q, k, v conv
        self._journal: Journal | None = None  # committed, not yet applied
        self._next_journal: Journal | None = None
        self._next_state: np.ndarray | None = None
        self._next_history: np.ndarray | None = None

    def advance(self, q: np.ndarray, journal: Journal, next_history: np.ndarray) -> np.ndarray:
        """Outputs float32 [T, H, d] of the tokens in `journal` with queries `q` [T, H, d]; pending until commit."""
        done = self._journal or Journal.of_no_tokens(journal)
        out = np.empty_like(q)
        short = q.shape[0] <= JOURNAL_TOKENS
        end = _NO_STATE if short else np.empty_like(self.state)
        advance(self.state, *done.arrays, q, *journal.arrays, out, end)
        self._journal = None  # it is in the state now, whatever becomes of this step
        # Copies: the arrays are slices of a batch, which would live as long as the longest of its sequences.
        self._next_journal = journal.copy() if short else None
        self._next_state = None if short else end
        self._next_history = next_history
        return out

    def commit(self) -> None:
        """Make the pending step part of the sequence."""
        if self._next_history is None:
            return
        self.history = self._next_history
        self._journal = self._next_journal
        if self._next_state is not None:
            self.state = self._next_state
        self.rollback()

    def rollback(self) -> None:
        """Drop the pending step."""
        self._next_journal = self._next_state = self._next_history = None


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
        """Take `n_tokens` of the step that just ran into the sequence."""
        for state in self.kda.values():
            state.commit()
        self.length += n_tokens

    def rollback(self) -> None:
        """Forget the step that just ran, wherever it stopped."""
        for state in self.kda.values():
            state.rollback()
