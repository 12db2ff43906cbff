"""What a request gives back. Names are vLLM's; `usage` is OpenAI's."""

from dataclasses import dataclass
from typing import Any

from streamer.engine.sampling import TokenLogprobs
from streamer.engine.sequence import Sequence
from streamer.engine.stats import RunStats


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion. `text` is None where the checkpoint has no tokenizer files; stop strings are cut from it, while
    `token_ids` are all that was generated."""

    text: str | None
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None
    seed: int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    stats: RunStats

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's shape."""
        completion = sum(len(output.token_ids) for output in self.outputs)
        return usage(len(self.prompt_token_ids), completion, self.num_cached_tokens)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's `usage` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def completion(sequence: Sequence, text: str | None, stop_string: str | None) -> CompletionOutput:
    """The completion of a finished sequence."""
    return CompletionOutput(
        text=text,
        token_ids=sequence.generated,
        finish_reason=sequence.finish_reason,
        stop_reason=stop_string if stop_string is not None else sequence.stop_id,
        logprobs=sequence.logprobs if sequence.params.logprobs is not None else None,
        seed=sequence.params.seed if sequence.params.temperature > 0 else None,
    )
