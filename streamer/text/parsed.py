"""What an answer says once it is parsed: reasoning, content, tool calls (k3-spec §7.7)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of new text. `channel` is thinking, response or tools; in tools the text is a readable form of calls."""

    channel: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of an answer.

    `undecoded` names the arguments whose value is not the JSON that its type promises: they are kept as raw strings.
    `raw` holds text that stood in the call outside of any argument. `complete` is False when the answer was cut inside
    the call. Run a call only when it is `usable`.
    """

    name: str
    index: int
    arguments: dict[str, Any]
    undecoded: tuple[str, ...] = ()
    raw: str = ""
    complete: bool = True

    @property
    def usable(self) -> bool:
        """Whether the call is whole and every argument could be read."""
        return bool(self.name) and self.complete and not self.undecoded and not self.raw.strip()


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """An answer. `reasoning` is None when no think channel was written; `complete` when the model itself ended it."""

    reasoning: str | None
    content: str
    tool_calls: list[ToolCall]
    complete: bool
    finish_reason: str

    def message(self) -> dict[str, Any]:
        """Return the OpenAI-shaped assistant message, with ids call_1, call_2, … for its calls."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{position}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for position, call in enumerate(self.tool_calls, start=1)
            ]
        return message


@dataclass(slots=True)
class CallBuilder:
    """Collects one call while it is written."""

    name: str
    index: int
    raw: str = ""
    complete: bool = False
    _values: list[list[str]] = field(default_factory=list)  # [key, type, text]

    @classmethod
    def opened(cls, attributes: Mapping[str, str], position: int) -> "CallBuilder":
        """Start from the attributes of open(call); without a usable index the position counts."""
        index = attributes.get("index", "")
        number = int(index) if index.isascii() and index.isdigit() and len(index) < 10 else position
        return cls(attributes.get("tool", ""), number)

    def open_argument(self, attributes: Mapping[str, str], whole: bool) -> str:
        """Start an argument, or the `json` form that holds all of them; return what to show for it."""
        key = "" if whole else attributes.get("key", "")
        comma = ", " if self._values else ""
        self._values.append([key, "whole" if whole else attributes.get("type", "string"), ""])
        return f"{comma}{key}=" if key else comma

    def add_value(self, text: str) -> None:
        """Append text to the argument opened last."""
        self._values[-1][2] += text

    def build(self) -> ToolCall:
        """Return the call as it stands. Strings are verbatim, other types are decoded as JSON."""
        arguments: dict[str, Any] = {}
        undecoded: list[str] = []
        for key, kind, text in self._values:
            value, readable = (text, True) if kind == "string" else _decode(text)
            if kind == "whole" and isinstance(value, dict):
                arguments.update(value)
                continue
            arguments[key] = value
            if not readable or not key:
                undecoded.append(key)
        return ToolCall(self.name, self.index, arguments, tuple(undecoded), self.raw, self.complete)


def _decode(text: str) -> tuple[Any, bool]:
    try:
        return json.loads(text), True
    except (ValueError, RecursionError):
        return text, False
