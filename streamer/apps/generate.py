"""Raw continuation of one prompt: what is checked before a model is loaded, the events of a run, the result as data."""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamer.apps.logits_file import LogitsFile
from streamer.apps.sampling import SamplingFlags
from streamer.config.errors import UsageError
from streamer.config.load import load_generation_defaults, load_model_config
from streamer.config.model import ModelConfig
from streamer.config.options import DEFAULT_CONTEXT_TOKENS, EngineOptions
from streamer.engine.sampling import SamplingParams, TokenLogprobs
from streamer.engine.sequence import Sequence as EngineSequence
from streamer.engine.sequence import check_prompt
from streamer.llm import LLM
from streamer.outputs import RequestOutput
from streamer.session import PromptProgress
from streamer.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 256

Event = PromptProgress | str | RequestOutput


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request that was checked against the checkpoint's configuration. `prompt` is None where ids were given."""

    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    seed_drawn: bool
    config: ModelConfig


def prepare(
    directories: Sequence[Path], prompt: str | list[int], flags: SamplingFlags, options: EngineOptions
) -> GenerateRequest:
    """Check all that can be checked without loading weights, so that an error does not come minutes later.

    Without --max-tokens the limit is DEFAULT_MAX_TOKENS, or what the context leaves. Raises a StreamerError.
    """
    config = load_model_config(directories)
    params = flags.params(load_generation_defaults(directories, config))
    text = prompt if isinstance(prompt, str) else None
    if text == "":
        raise UsageError("The prompt is empty: expected at least one character in -p, -f or standard input.")
    if isinstance(prompt, str):
        ids = Tokenizer.from_directories(directories, config.vocab_size).encode(prompt)
    else:
        ids = prompt
    context = min(options.context_tokens or DEFAULT_CONTEXT_TOKENS, config.max_position_embeddings)
    room = check_prompt(ids, config.vocab_size, context, params.max_tokens)
    if params.max_tokens is None:
        params = replace(params, max_tokens=min(room, DEFAULT_MAX_TOKENS))
    return GenerateRequest(text, ids, params, flags.seed is None, config)


def run(llm: LLM, request: GenerateRequest, dump: LogitsFile | None = None) -> Generator[Event, None, None]:
    """Yield progress on the prompt, text as it becomes certain (ids where there is no tokenizer), then the output.

    Raises StorageError or NumericsError in the middle; closing the iterator ends the request.
    """
    has_text = llm.tokenizer_if_any() is not None
    yield PromptProgress(0, len(request.prompt_ids))
    sequence: EngineSequence | None = None
    shown = 0
    with closing(llm.stream(request.prompt_ids, request.params, dump.write if dump else None)) as stream:
        for item in stream:
            sequence = sequence or next(iter(llm.engine.running), None)
            output = item if isinstance(item, RequestOutput) else None
            if output is None and sequence is not None and sequence.n_sampled == 0:
                yield PromptProgress(sequence.state.length, sequence.n_prompt)
                continue
            if not has_text:
                ids = output.outputs[0].token_ids if output else sequence.generated if sequence else []
                yield "".join(f",{token}" for token in ids[shown:])[0 if shown else 1 :]
                shown = len(ids)
            yield item


def report(llm: LLM, request: GenerateRequest, output: RequestOutput) -> dict[str, Any]:
    """The finished request as one JSON object; text is exactly what was generated, without stop strings."""
    completion = output.outputs[0]
    tokenizer = llm.tokenizer_if_any()
    logprobs = None
    if completion.logprobs is not None:
        logprobs = [_logprob(entry, tokenizer) for entry in completion.logprobs]
    params = request.params
    return {
        "model": " + ".join(str(directory) for directory in llm.directories),
        "prompt": request.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_token_ids": output.prompt_token_ids,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "usage": output.usage,
        "seed": completion.seed,
        "stats": output.stats.to_dict(),
        "options": {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "max_tokens": params.max_tokens,
            "stop": list(params.stop),
            "context_tokens": llm.context_tokens,
            "slots_per_layer": llm.memory.slots_per_layer,
            "prefill_chunk": llm.engine.prefill_chunk,
            "memory": llm.memory.budget_bytes,
            "trunk": llm.memory.placement.format,
        },
    }


def _logprob(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        **_token(entry.token_id, entry.logprob, tokenizer),
        "top": [_token(token_id, logprob, tokenizer) for token_id, logprob in entry.top],
    }


def _token(token_id: int, logprob: float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Half a character has no text of its own: its bytes are given too, as in OpenAI's format."""
    data = tokenizer.token_bytes(token_id) if tokenizer else None
    return {
        "token_id": token_id,
        "token": data.decode("utf-8", "replace") if data is not None else None,
        "bytes": list(data) if data is not None else None,
        "logprob": logprob,
    }
