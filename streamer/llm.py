"""The public API: load a checkpoint, generate, hold conversations. Names are vLLM's where it has them."""

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from streamer.config.bundled import model_directory
from streamer.config.errors import TokenizerError, UsageError
from streamer.config.load import load_generation_defaults
from streamer.config.options import EngineOptions
from streamer.engine.engine import Cancelled
from streamer.engine.loader import Progress, load_model
from streamer.engine.sampling import SamplingParams
from streamer.engine.sequence import Sequence as EngineSequence
from streamer.engine.stats import RunStats
from streamer.engine.timeline import Timeline
from streamer.outputs import RequestOutput, completion
from streamer.session import Session
from streamer.text.stop import StopStrings
from streamer.text.tokenizer import IncrementalDecoder, Tokenizer

Prompt = str | Sequence[int]
LogitsSink = Callable[[int, np.ndarray], None]  # (first position, float32 [n, vocab])


class LLM:
    """A loaded checkpoint. Use it as a context manager, or `close` it.

    `model` is a directory, several (a checkpoint split over drives), or None for the bundled k3-nano. Raises
    ConfigError, StorageError or UsageError, each a sentence for a person.
    """

    def __init__(
        self,
        model: str | Path | Sequence[str | Path] | None = None,
        options: EngineOptions | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.directories = model_directory(model)
        self._loaded = load_model(self.directories, options or EngineOptions(), progress)
        self.engine = self._loaded.engine
        self.memory = self._loaded.memory
        self.context_tokens = self._loaded.context_tokens
        self.config = self.engine.config
        self.defaults = load_generation_defaults(self.directories, self.config)
        self._tokenizer: Tokenizer | None = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the readers and give memory and files back. Idempotent."""
        self._loaded.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, loaded on first use; raises TokenizerError when its files are not there."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_directories(self.directories, self.config.vocab_size)
        return self._tokenizer

    def tokenizer_if_any(self) -> Tokenizer | None:
        """The tokenizer, or None where the checkpoint has no tokenizer files: token ids work without."""
        if any(
            (directory / "tiktoken.model").is_symlink() or (directory / "tiktoken.model").exists()
            for directory in self.directories
        ):  # a dangling link is a broken download, not an absent file
            return self.tokenizer
        return None

    def default_params(self) -> SamplingParams:
        """Sampling parameters of generation_config.json."""
        return SamplingParams(
            temperature=self.defaults.temperature, top_p=self.defaults.top_p, top_k=self.defaults.top_k
        )

    def cancel(self) -> None:
        """Stop what is running before its next layer; what was generated is kept. Safe from a signal handler."""
        self.engine.cancel()

    def session(
        self,
        *,
        system: str | None = None,
        tools: list[dict[str, object]] | None = None,
        thinking: bool = True,
        effort: str = "low",
        params: SamplingParams | None = None,
        max_think_tokens: int | None = None,
    ) -> Session:
        """A conversation that feeds only what is new in each turn."""
        return Session(
            self.engine,
            self.tokenizer,
            context_tokens=self.context_tokens,
            stop_ids=frozenset(self.defaults.eos_token_ids),
            params=params or self.default_params(),
            max_think_tokens=max_think_tokens,
            system=system,
            tools=tools,
            thinking=thinking,
            effort=effort,
        )

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[RequestOutput]:
        """Continue each prompt (text, or token ids); as many run together as memory has room for states.

        Every prompt is checked before the first token is computed. Results are in the order of the prompts; after
        `cancel`, those that did not end by themselves say so.
        """
        asked = _prompts(prompts)
        with self.engine.exclusive():
            runs = [_Run(self, prompt, params or self.default_params()) for prompt in asked]
            self._run_all(runs)
            return [run.result() for run in runs]

    def _run_all(self, runs: "list[_Run]") -> None:
        """Step until all have ended or are cancelled, as many at a time as memory has room for."""
        waiting = runs[::-1]
        try:
            while waiting or self.engine.running:
                while waiting and len(self.engine.running) < self.memory.max_sequences:
                    self.engine.add(waiting.pop().sequence)
                for sequence in self.engine.step():
                    next(run for run in runs if run.sequence is sequence).advance()
        except Cancelled:
            for run in runs:
                run.stop("cancelled")
        finally:
            for run in runs:
                self.engine.remove(run.sequence)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, on_logits: LogitsSink | None = None
    ) -> Generator[str | RequestOutput, None, None]:
        """Continue one prompt: yields text as it becomes certain, then the finished RequestOutput.

        An empty string is yielded when a step gave no text (a prompt chunk, half a character), so that a caller can
        show progress. `on_logits` gets the logits of every position that is computed.
        """
        with self.engine.exclusive():
            run = _Run(self, prompt, params or self.default_params())
            if on_logits is not None:
                self.engine.on_logits = lambda _sequence, first, logits: on_logits(first, logits)
            self.engine.add(run.sequence)
            try:
                while not run.finished:
                    yield run.advance() if self.engine.step() else ""
            except Cancelled:
                run.stop("cancelled")
            finally:
                self.engine.remove(run.sequence)
                self.engine.on_logits = None
            if tail := run.flush():
                yield tail
            yield run.result()


class _Run:
    """One completion request: its sequence, and the text that is certain so far."""

    def __init__(self, llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
        self.prompt = prompt if isinstance(prompt, str) else None
        tokenizer = llm.tokenizer if self.prompt is not None else llm.tokenizer_if_any()
        if params.stop and tokenizer is None:
            raise TokenizerError("--stop needs text, and this checkpoint has no tiktoken.model. Fetch it, or drop it.")
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        banned = np.array(tokenizer.banned_ids, np.int64) if tokenizer else None
        stop_ids = frozenset(llm.defaults.eos_token_ids)
        self.sequence: EngineSequence = Timeline(llm.engine, llm.context_tokens).request(ids, params, stop_ids, banned)
        self._llm = llm
        self._began = RunStats.of(llm.engine)
        self._decoder = IncrementalDecoder(tokenizer) if tokenizer else None
        self._stops = StopStrings(params.stop)
        self._text: list[str] = []
        self._seen = 0

    @property
    def finished(self) -> bool:
        """Whether the request ended, for whatever reason."""
        return self.sequence.finish_reason is not None

    def advance(self) -> str:
        """Take the ids that the last step added; returns the text that is certain now."""
        if self._decoder is None:
            return ""
        shown = ""
        for token in self.sequence.generated[self._seen :]:
            self._seen += 1
            if token in self.sequence.stop_ids:
                break
            text, stopped = self._stops.push(self._decoder.push(token))
            shown += text
            if stopped:
                self.stop("stop")
                break
        self._text.append(shown)
        if self.finished:
            self.sequence.state = self._llm.engine.new_state(0)  # the next of many prompts needs the memory
        return shown

    def flush(self) -> str:
        """Text held back for a stop string or a half character that never came."""
        if self._decoder is None or self._stops.stopped is not None:
            return ""
        tail, stopped = self._stops.push(self._decoder.flush())
        tail += "" if stopped else self._stops.flush()
        self._text.append(tail)
        return tail

    def stop(self, reason: str) -> None:
        """End the request from outside the engine, unless it ended by itself."""
        if self._stops.stopped is not None or self.sequence.finish_reason is None:
            self.sequence.finish_reason = reason
        self._llm.engine.remove(self.sequence)

    def result(self) -> RequestOutput:
        """The finished request."""
        self.flush()
        text = "".join(self._text) if self._decoder else None
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self.sequence.tokens[: self.sequence.n_prompt],
            outputs=[completion(self.sequence, text, self._stops.stopped)],
            num_cached_tokens=self.sequence.n_cached,
            stats=RunStats.of(self._llm.engine) - self._began,
        )


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of prompts. Raises UsageError for anything that is neither."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or not prompts:
        raise UsageError(
            f"prompts: expected a text, a list of token ids, or a list of such prompts, found {prompts!r}."
        )
    if all(_is_id(item) for item in prompts):
        return [[int(item) for item in prompts if not isinstance(item, str | Sequence)]]
    checked: list[Prompt] = []
    for index, item in enumerate(prompts):
        if isinstance(item, str):
            checked.append(item)
        elif isinstance(item, Sequence) and all(_is_id(token) for token in item):
            checked.append([int(token) for token in item])
        else:
            raise UsageError(f"prompts[{index}]: expected a text or a list of token ids, found {item!r}.")
    return checked


def _is_id(item: object) -> bool:
    """Whether this is an integer; numpy's count, truth values do not."""
    return isinstance(item, int | np.integer) and not isinstance(item, bool)
