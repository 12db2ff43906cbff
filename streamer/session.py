"""A conversation with a model: text in, channels of text out, only new tokens computed.

The ids that were generated are kept (re-encoding an answer's text gives other ids), so each prompt extends the state
of the last. An answer that was cut (Ctrl-C, a token limit, a failed read) is closed by the format's own rules before
the next turn (`streamer.text.closing`). A turn of which nothing was computed is forgotten.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from streamer.config.errors import UsageError
from streamer.engine.engine import Cancelled, Engine
from streamer.engine.sampling import SamplingParams, TokenLogprobs
from streamer.engine.sequence import Sequence as EngineSequence
from streamer.engine.stats import RunStats
from streamer.engine.timeline import Timeline
from streamer.outputs import completion, usage
from streamer.text.closing import end_thinking
from streamer.text.conversation import Conversation
from streamer.text.parsed import Delta, ParsedMessage
from streamer.text.parser import OutputParser
from streamer.text.stop import StopStrings
from streamer.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of the new part of the prompt is computed."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished turn."""

    message: ParsedMessage
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None
    usage: dict[str, object]
    stats: RunStats


class Session:
    """One conversation on one engine. `params`, `max_think_tokens` and the conversation's settings may change between
    turns; a change of system prompt, thinking or effort makes the next prompt be read anew."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        context_tokens: int,
        stop_ids: frozenset[int],
        params: SamplingParams,
        max_think_tokens: int | None,
        system: str | None,
        tools: list[dict[str, object]] | None,
        thinking: bool,
        effort: str,
    ) -> None:
        if max_think_tokens is not None and max_think_tokens < 0:
            raise UsageError(f"--max-think-tokens: expected 0 or more, found {max_think_tokens}.")
        self.conversation = Conversation(tokenizer, system=system, tools=tools, thinking=thinking, effort=effort)
        self.params = params
        self.max_think_tokens = max_think_tokens
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids | {tokenizer.end_of_msg}
        self._banned = np.array(tokenizer.banned_ids, np.int64)
        self._timeline = Timeline(engine, context_tokens)

    @property
    def context_used(self) -> int:
        """Tokens of this conversation that are computed."""
        return len(self._timeline.computed)

    @property
    def context_tokens(self) -> int:
        """Tokens that this conversation can hold."""
        return self._timeline.context_tokens

    def reset(self) -> None:
        """Begin anew with the same settings."""
        self.conversation.reset()

    def pending_tokens(self, text: str) -> int:
        """How many tokens would have to be computed before the answer to `text` begins."""
        self.conversation.add_user(text)
        try:
            prompt = self.conversation.prompt_ids()
        finally:
            self.conversation.retract()
        return len(prompt) - self._timeline.cached(prompt)

    def send(self, text: str) -> Iterator[PromptProgress | Delta | Answer]:
        """Say something; yields progress on the prompt, text by channel as it becomes certain, then the Answer.

        Raises ContextLimitError before anything is computed (the turn is forgotten), StorageError or NumericsError
        in the middle (what was generated stays in the conversation).
        """
        with self._engine.exclusive():  # before anything changes: the model may be busy
            self.conversation.add_user(text)
            yield from self._answer()

    def answer(self) -> Iterator[PromptProgress | Delta | Answer]:
        """Answer what was added to the conversation last: `send` without a text, for tool results."""
        with self._engine.exclusive():
            yield from self._answer()

    def _answer(self) -> Iterator[PromptProgress | Delta | Answer]:
        try:
            prompt = self.conversation.prompt_ids()
            sequence = self._timeline.request(prompt, self.params, self._stop_ids, self._banned)
        except Exception:
            self.conversation.retract()
            raise
        turn = _Turn(self._engine, self._tokenizer, sequence, self.conversation.thinking, self.max_think_tokens)
        began = RunStats.of(self._engine)
        try:
            yield from turn.run()
        finally:
            self._engine.remove(sequence)
            message = self._keep(sequence, turn)
        if message is not None:
            output = completion(sequence, message.content, turn.stops.stopped)
            yield Answer(
                message,
                output.token_ids,
                output.finish_reason or "cancelled",
                output.logprobs,
                usage(sequence.n_prompt, len(output.token_ids), sequence.n_cached),
                RunStats.of(self._engine) - began,
            )

    def _keep(self, sequence: EngineSequence, turn: "_Turn") -> ParsedMessage | None:
        """Put what was generated into the conversation; forget a turn of which nothing was computed."""
        if sequence.state.length == sequence.n_cached and not sequence.generated:
            self.conversation.retract()
            return turn.parser.finish("cancelled") if sequence.finish_reason == "cancelled" else None
        return self.conversation.add_generated(sequence.generated, sequence.finish_reason or "cancelled")


class _Turn:
    """One answer being generated."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        sequence: EngineSequence,
        thinking: bool,
        max_think_tokens: int | None,
    ) -> None:
        self._engine = engine
        self._sequence = sequence
        self._think_left = max_think_tokens if thinking else None
        self._tokenizer = tokenizer
        self.parser = OutputParser(tokenizer, thinking)
        self.stops = StopStrings(sequence.params.stop)
        self._seen = 0

    def run(self) -> Iterator[PromptProgress | Delta]:
        """Step until the answer ends or is cancelled."""
        sequence, engine = self._sequence, self._engine
        total = sequence.waiting
        engine.add(sequence)
        yield PromptProgress(0, total)
        try:
            while sequence.finish_reason is None:
                if engine.step():
                    if self._seen == 0:
                        yield PromptProgress(total, total)
                    yield from self._advance()
                else:
                    yield PromptProgress(total - sequence.waiting, total)
        except Cancelled:
            sequence.finish_reason = "cancelled"
        if held := self.stops.flush():
            yield Delta("response", held)

    def _advance(self) -> Iterator[Delta]:
        """Parse the ids that the last step added."""
        generated = self._sequence.generated
        for token in generated[self._seen :]:
            self._seen += 1
            for delta in self.parser.push(token):
                yield from self._show(delta)
        if self.parser.done and self._sequence.finish_reason is None:
            self._sequence.finish_reason = "stop"
        self._limit_thinking()

    def _show(self, delta: Delta) -> Iterator[Delta]:
        if delta.channel != "response":
            yield delta
            return
        text, stopped = self.stops.push(delta.text)
        if text:
            yield Delta("response", text)
        if stopped:
            self._sequence.finish_reason = "stop"

    def _limit_thinking(self) -> None:
        """Close the think channel when its budget is spent, unless the model is just closing it."""
        if self._think_left is None or self._sequence.finish_reason is not None:
            return
        thought = self._seen if self.parser.stack == ["think"] else 0
        if thought > self._think_left and self.parser.half is None:
            forced = end_thinking(self.parser, self._tokenizer)
            self._sequence.force(forced)
            self._seen += len(forced)
            self._think_left = None
