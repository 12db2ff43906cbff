"""A conversation as one growing list of ids (k3-spec §7.3, §7.6).

Invariant: as long as no setting changes, `prompt_ids()` strictly extends the previous prompt followed by the ids that
were generated from it. The engine's state cannot be rewound, so this is what lets a turn cost only its new tokens.
`set_thinking`, `set_effort`, `set_system`, `undo` and `reset` change what was already read; the prompt after them does
not extend the one before, and the engine has to read it again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamer.config.errors import UsageError
from streamer.text.answer import Answer
from streamer.text.chat import generation_prefix, head_segments
from streamer.text.messages import Message, input_segments, tool_run_segments
from streamer.text.parsed import ParsedMessage
from streamer.text.tokenizer import Tokenizer
from streamer.text.tools import check_effort
from streamer.text.xtml import encode_segments


@dataclass(frozen=True, slots=True)
class _Input:
    """A user message and its ids, which no setting changes."""

    message: Message
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _ToolResult:
    """A tool result. Its ids depend on the results beside it: they are put into the order of the calls."""

    message: Message


class Conversation:
    """Turns of one conversation and the settings they are rendered with.

    Think mode applies to the whole history and the effort stands before the first message, so both are settings of the
    conversation, not of a turn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        tools: Sequence[Message] | None = None,
        thinking: bool = True,
        effort: str = "low",
    ) -> None:
        """Raises UsageError for an unknown effort or malformed tools."""
        self._tokenizer = tokenizer
        self._turns: list[_Input | _ToolResult | Answer] = []
        self._system = system
        self._tools = tools
        self._thinking = thinking
        self._effort = effort
        self._head_ids()  # so that a wrong setting is found here and not at the first turn

    @property
    def thinking(self) -> bool:
        """Whether the model thinks before it answers."""
        return self._thinking

    @property
    def effort(self) -> str:
        """The reasoning effort; only read by the model in thinking mode."""
        return self._effort

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self._system

    def set_thinking(self, thinking: bool) -> None:
        """Switch the mode of the whole conversation; the next prompt is read anew."""
        self._thinking = thinking

    def set_effort(self, effort: str) -> None:
        """Change the effort; in thinking mode the next prompt is read anew. Raises UsageError for an unknown one."""
        check_effort(effort)
        self._effort = effort

    def set_system(self, system: str | None) -> None:
        """Change the system prompt; the next prompt is read anew. Raises UsageError for text that is not Unicode."""
        self._system_ids(system)
        self._system = system

    def reset(self) -> None:
        """Forget all turns; keep the settings."""
        self._turns.clear()

    def undo(self) -> bool:
        """Forget the last answer and everything since the answer before it; False when there was nothing."""
        had_turns = bool(self._turns)
        if had_turns:
            self._turns.pop()
        while self._turns and not isinstance(self._turns[-1], Answer):
            self._turns.pop()
        return had_turns

    def retract(self) -> None:
        """Forget the message or tool result that was added last; an answer stays."""
        if self._turns and not isinstance(self._turns[-1], Answer):
            self._turns.pop()

    def add_user(self, text: str) -> None:
        """Add a user message. Raises UsageError for text that is not valid Unicode."""
        message = {"role": "user", "content": text}
        ids = encode_segments(input_segments([message], self._thinking), self._tokenizer)
        self._turns.append(_Input(message, tuple(ids)))

    def add_tool_result(self, content: str, *, tool_call_id: str | None = None, name: str | None = None) -> None:
        """Add the result of a call of the last answer.

        Ids are those of `messages()`: call_1, call_2, … Without an id, results are taken in the order of the calls.
        Raises UsageError when neither id, name nor place says which tool answered.
        """
        message: dict[str, Any] = {"role": "tool", "content": content}
        if tool_call_id is not None:
            message["tool_call_id"] = tool_call_id
        if name is not None:
            message["name"] = name
        self._turns.append(_ToolResult(message))
        try:
            self._turn_ids()
        except UsageError:
            self._turns.pop()
            raise

    def add_generated(self, ids: Sequence[int], finish_reason: str) -> ParsedMessage:
        """Add the answer to `prompt_ids()` as the ids that were generated; return what it says.

        An answer that does not end with `<|end_of_msg|>` is ended by the rule of `streamer.text.closing` when the next
        turn is rendered, whatever the reason. Raises UsageError for an unknown id, or when no answer is due.
        """
        self._check_due()
        answer = Answer.read(ids, self._thinking, finish_reason, self._tokenizer)
        self._turns.append(answer)
        return answer.parsed

    def prompt_ids(self) -> list[int]:
        """Return all ids up to and including the generation prefix. Raises UsageError when no answer is due."""
        self._check_due()
        return [*self._head_ids(), *self._turn_ids(), *self._prefix_ids()]

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation as OpenAI-shaped messages, for display and export."""
        messages: list[dict[str, Any]] = []
        if self._system is not None:
            messages.append({"role": "system", "content": self._system})
        for turn in self._turns:
            messages.append(turn.parsed.message() if isinstance(turn, Answer) else dict(turn.message))
        return messages

    def state(self) -> dict[str, Any]:
        """Return settings and turns as plain JSON data, generated ids included, for `from_state`."""
        turns: list[dict[str, Any]] = []
        for turn in self._turns:
            if isinstance(turn, Answer):
                reason = turn.parsed.finish_reason
                turns.append({"ids": list(turn.generated), "thinking": turn.thinking, "finish_reason": reason})
            else:
                turns.append({"message": dict(turn.message)})
        settings = {"system": self._system, "tools": self._tools, "thinking": self._thinking, "effort": self._effort}
        return {**settings, "turns": turns}

    @classmethod
    def from_state(cls, tokenizer: Tokenizer, state: Mapping[str, Any]) -> "Conversation":
        """Rebuild a conversation; its prompts have the same ids. Raises UsageError for what `state` did not write."""
        try:
            settings = {key: state[key] for key in ("system", "tools", "thinking", "effort")}
            conversation = cls(tokenizer, **settings)
            for turn in state["turns"]:
                if "ids" in turn:
                    answer = Answer.read(turn["ids"], turn["thinking"], turn["finish_reason"], tokenizer)
                    conversation._turns.append(answer)
                elif turn["message"]["role"] == "user":
                    conversation.add_user(turn["message"]["content"])
                else:
                    conversation._turns.append(_ToolResult(turn["message"]))
            conversation._turn_ids()
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"conversation state: expected what this version saves, found {type(error).__name__}: {error}."
                " The file is damaged or of another version; start a new conversation."
            ) from error
        return conversation

    def _check_due(self) -> None:
        if not self._turns or isinstance(self._turns[-1], Answer):
            found = "an answer" if self._turns else "an empty conversation"
            raise UsageError(
                f"conversation: expected a user message or a tool result to answer, found {found}. Add one first."
            )

    def _system_ids(self, system: str | None) -> list[int]:
        if system is None:
            return []
        segments = input_segments([{"role": "system", "content": system}], self._thinking)
        return encode_segments(segments, self._tokenizer)

    def _head_ids(self) -> list[int]:
        head = encode_segments(head_segments(self._tools, self._thinking, self._effort), self._tokenizer)
        return head + self._system_ids(self._system)

    def _prefix_ids(self) -> list[int]:
        return encode_segments(generation_prefix(self._thinking), self._tokenizer)

    def _turn_ids(self) -> list[int]:
        ids: list[int] = []
        calls: list[Any] = []
        n_results = 0
        run: list[tuple[int, Message]] = []
        place = 0 if self._system is None else 1  # among messages(), for error messages
        prefix = self._prefix_ids()
        for number, turn in enumerate(self._turns):
            if isinstance(turn, _ToolResult):
                run.append((place + number, turn.message))
                continue
            ids += encode_segments(tool_run_segments(run, calls, n_results), self._tokenizer)
            n_results += len(run)
            run = []
            if isinstance(turn, Answer):
                ids += turn.message_ids(self._thinking, prefix, self._tokenizer)
                calls, n_results = turn.parsed.message().get("tool_calls", []), 0
            else:
                ids += turn.ids
        return ids + encode_segments(tool_run_segments(run, calls, n_results), self._tokenizer)
