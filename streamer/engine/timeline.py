"""A timeline: ids and state of one conversation, outliving its requests, so that a next turn feeds only its new tokens.

The state of KDA cannot be rewound, so it is reused only when the new ids strictly extend those it contains;
otherwise the prompt is read from its beginning.
"""

from collections.abc import Sequence as Ids

import numpy as np

from streamer.engine.engine import Engine
from streamer.engine.sampling import SamplingParams
from streamer.engine.sequence import Sequence, check_prompt
from streamer.model.state import SequenceState


class Timeline:
    """State of one conversation and the ids that are in it."""

    def __init__(self, engine: Engine, context_tokens: int) -> None:
        self._engine = engine
        self.context_tokens = context_tokens
        self._state: SequenceState | None = None
        self._tokens: list[int] = []  # of which the first state.length are computed

    @property
    def computed(self) -> list[int]:
        """Ids that the state contains."""
        return self._tokens[: self._state.length] if self._state else []

    def cached(self, prompt: Ids[int]) -> int:
        """How many tokens of `prompt` need not be computed again: all computed ones, or none."""
        done = self.computed
        return len(done) if len(done) < len(prompt) and list(prompt[: len(done)]) == done else 0

    def request(
        self,
        prompt: Ids[int],
        params: SamplingParams,
        stop_ids: frozenset[int],
        banned: np.ndarray | None = None,
    ) -> Sequence:
        """A sequence that continues this timeline with `prompt` (the whole conversation so far) as its ids."""
        max_tokens = check_prompt(prompt, self._engine.config.vocab_size, self.context_tokens, params.max_tokens)
        cached = self.cached(prompt)
        if self._state is None or cached == 0:
            self._state = None  # give the old one back first: a released state is half a gigabyte
            self._state = self._engine.new_state(self.context_tokens)
        self._tokens = list(prompt)
        return Sequence(
            state=self._state,
            params=params.with_seed(),
            tokens=self._tokens,  # shared on purpose: what the engine appends is what this timeline contains
            n_prompt=len(prompt),
            n_cached=cached,
            stop_ids=frozenset() if params.ignore_eos else stop_ids | frozenset(params.stop_token_ids),
            max_tokens=max_tokens,
            banned=banned,
        )
