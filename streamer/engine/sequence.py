"""One request inside the engine: its token ids, its state, and why it ended."""

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

import numpy as np

from streamer.config.errors import ContextLimitError, UsageError
from streamer.engine.sampling import SamplingParams, TokenLogprobs
from streamer.model.state import SequenceState


@dataclass(slots=True)
class Sequence:
    """Token ids of one timeline. The first `state.length` of them are in the state; the others wait to be computed."""

    state: SequenceState
    params: SamplingParams
    tokens: list[int]
    n_prompt: int
    n_cached: int  # prompt tokens that were in the state already
    stop_ids: frozenset[int]
    max_tokens: int
    banned: np.ndarray | None = None
    finish_reason: str | None = None  # "stop", "length", "cancelled"
    stop_id: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    n_sampled: int = 0

    @property
    def waiting(self) -> int:
        """Tokens known but not yet computed."""
        return len(self.tokens) - self.state.length

    @property
    def generated(self) -> list[int]:
        """Ids after the prompt."""
        return self.tokens[self.n_prompt :]

    def take(self, token: int) -> None:
        """Append a sampled token and see whether it ends the request."""
        self.tokens.append(token)
        self.n_sampled += 1
        if token in self.stop_ids:
            self.finish_reason, self.stop_id = "stop", token
        elif len(self.generated) >= self.max_tokens:
            self.finish_reason = "length"

    def force(self, ids: Ids[int]) -> None:
        """Append ids that were not sampled (closing a channel, say); they are computed before the next sample."""
        self.tokens.extend(ids)
        if self.finish_reason is None and len(self.generated) >= self.max_tokens:
            self.finish_reason = "length"


def check_prompt(prompt: Ids[int], vocab_size: int, context_tokens: int, max_tokens: int | None) -> int:
    """Validate a prompt against vocabulary and context; returns how many tokens may be generated.

    Raises UsageError for an empty prompt or an id outside the vocabulary, ContextLimitError when prompt and
    `max_tokens` do not fit `context_tokens`.
    """
    if not prompt:
        raise UsageError("The prompt is empty: expected at least one token. Give -p TEXT, -f FILE or --ids.")
    for position, token in enumerate(prompt):
        if not 0 <= token < vocab_size:
            raise UsageError(f"Token id {token} at position {position}: expected 0 to {vocab_size - 1}.")
    room = context_tokens - len(prompt)
    if room < 1 or (max_tokens is not None and max_tokens > room):
        wanted = f" and {max_tokens:,} to generate" if max_tokens else ""
        raise ContextLimitError(
            f"The context holds {context_tokens:,} tokens; found a prompt of {len(prompt):,}{wanted}, "
            f"{len(prompt) + (max_tokens or 1) - context_tokens:,} too many. Nothing was cut. "
            "Raise --ctx-size, shorten the prompt, or lower --max-tokens."
        )
    return room if max_tokens is None else max_tokens
