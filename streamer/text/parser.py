"""Read a generated answer token by token: channels, tool calls, where it ended (k3-spec §7.6, §7.7).

Works on ids, never on rendered text: only the ids of the four markers carry structure, so an answer may talk about
markers. The rules for answers that do not follow the format:

- Opening a channel ends what is open; `<|end_of_msg|>`, closing the message, or opening another one ends the answer.
- Closing an outer element closes the inner ones; closing what is not open does nothing.
- A tag directly before another marker counts without its separator.
- What cannot be a tag is text: its markers are dropped, its words are kept. So are words between the channels, as
  response; whitespace there is layout and is dropped.
- At the end, a half-written tag and a half-written character are not text.
"""

import codecs
from dataclasses import dataclass

from streamer.text.half_tag import HalfTag, Tag
from streamer.text.parsed import CallBuilder, Delta, ParsedMessage
from streamer.text.tokenizer import Tokenizer

_CHANNELS = ("think", "response", "tools")
_SHOWN_AS = {"think": "thinking", "response": "response"}


@dataclass(frozen=True, slots=True)
class Span:
    """The ids `start` to `end` of the answer are the inside of channel `name`, without its own tags."""

    name: str
    start: int
    end: int


class OutputParser:
    """Parse one answer; starts inside the channel that the generation prefix opened.

    `stack` holds the open elements, outermost first; `half` is the tag being written; `ended` is None, `message` (its
    close was written), `reopened` (the model began another message), or `stop` (`<|end_of_msg|>`). `spans` are the
    channels closed so far. Generation may stop as soon as `done`.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        """`thinking` says which channel the prompt opened."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._deltas: list[Delta] = []
        self._texts: dict[str, list[str]] = {"thinking": [], "response": []}
        self._calls: list[CallBuilder] = []
        self._layout = ""  # whitespace between elements, shown only if words follow it
        self._n_ids = 0
        self._inside_from = 0
        self._eos = False
        self.stack: list[str] = ["think" if thinking else "response"]
        self.opened: set[str] = set(self.stack)
        self.half: HalfTag | None = None
        self.ended: str | None = None
        self.spans: list[Span] = []

    @property
    def done(self) -> bool:
        """Whether the model ended its answer, in whatever way."""
        return self._eos or self.ended is not None

    def push(self, token_id: int) -> list[Delta]:
        """Take one generated id; return the text that is now certain. Raises UsageError for an unknown id."""
        data = self._tokenizer.token_bytes(token_id)
        self._deltas = []
        at, self._n_ids = self._n_ids, self._n_ids + 1
        if token_id == self._tokenizer.end_of_msg:
            self._end_of_message(at)
        elif self.ended is not None:
            pass  # behind the end of the message there is no channel that text could belong to
        elif token_id in (self._tokenizer.open, self._tokenizer.close):
            self._settle_half(at)
            self._flush()
            self.half = HalfTag(token_id == self._tokenizer.open, at)
        elif token_id == self._tokenizer.sep:
            self._settle_half(at + 1)
        elif token_id == self._tokenizer.eos:
            self._eos = True  # not part of the format: whatever is open stays open
        elif not self._tokenizer.is_special(token_id):
            self._ordinary(token_id, data)
        return self._deltas

    def finish(self, reason: str) -> ParsedMessage:
        """Return the answer as it stands; changes nothing. `reason` is why generation ended, as the engine says."""
        thought = "".join(self._texts["thinking"])
        return ParsedMessage(
            reasoning=thought if thought or "think" in self.opened else None,
            content="".join(self._texts["response"]),
            tool_calls=[call.build() for call in self._calls],
            complete=self.done,
            finish_reason=reason,
        )

    def _ordinary(self, token_id: int, data: bytes) -> None:
        if self.half is None:
            self._text(self._decoder.decode(data))
        elif not self.half.push(token_id, data):
            self._release_half()

    def _release_half(self) -> None:
        """Give a tag that is none back as text."""
        if self.half is not None:
            data, self.half = self.half.data, None
            self._text(self._decoder.decode(data))

    def _settle_half(self, inside_from: int) -> None:
        """End the tag being written: act on it, or keep its words. What it opens begins at `inside_from`."""
        if self.half is None:
            return
        tag, start = self.half.parse(), self.half.start
        if tag is None or (tag.is_open and tag.name in ("argument", "json") and "call" not in self.stack):
            self._release_half()
            return
        self.half = None
        self._layout = ""
        if tag.is_open:
            self._open(tag, start, inside_from)
        elif tag.name == "message":
            self._pop_to(0, start)
            self.ended = "message"
        elif tag.name in self.stack:
            self._pop_to(self.stack.index(tag.name), start)

    def _open(self, tag: Tag, start: int, inside_from: int) -> None:
        if tag.name == "message":
            self._pop_to(0, start)
            self.ended = "reopened"
        elif tag.name in _CHANNELS:
            self._pop_to(0, start)
            self._push(tag.name, inside_from)
        elif tag.name == "call":
            if "tools" in self.stack:
                self._pop_to(1, start)
            else:
                self._pop_to(0, start)
                self._push("tools", start)  # the call's own tags belong to the inside of an implied tools channel
            self._push("call", inside_from)
            self._calls.append(CallBuilder.opened(tag.attributes, len(self._calls) + 1))
            self._emit("tools", f"{self._calls[-1].name}(")
        else:
            self._pop_to(2, start)
            self._push(tag.name, inside_from)
            self._emit("tools", self._calls[-1].open_argument(tag.attributes, whole=tag.name == "json"))

    def _push(self, name: str, inside_from: int) -> None:
        self.stack.append(name)
        self.opened.add(name)
        if len(self.stack) == 1:
            self._inside_from = inside_from

    def _pop_to(self, depth: int, at: int) -> None:
        """Close the innermost elements until `depth` are left; the insides end before id number `at`."""
        while len(self.stack) > depth:
            name = self.stack.pop()
            if name == "call":
                self._calls[-1].complete = True
                self._emit("tools", ")\n")
            elif not self.stack:
                self.spans.append(Span(name, self._inside_from, at))

    def _end_of_message(self, at: int) -> None:
        if self.ended is None:
            start = self.half.start if self.half is not None and self.half.parse() else at
            self._settle_half(at)
            self._flush()
            self._pop_to(0, start)
        self.ended = "stop"

    def _flush(self) -> None:
        """A marker ends the character before it."""
        self._text(self._decoder.decode(b"", final=True))
        self._decoder.reset()

    def _text(self, text: str) -> None:
        if not text:
            return
        inner = self.stack[-1] if self.stack else None
        if inner in _SHOWN_AS:
            self._emit(_SHOWN_AS[inner], text)
        elif inner in ("argument", "json"):
            self._calls[-1].add_value(text)
            self._emit("tools", text)
        elif inner == "call":
            self._calls[-1].raw += text
            self._emit("tools", text)
        else:
            self._between(text)

    def _between(self, text: str) -> None:
        """Text outside of every channel, or between two calls."""
        self._layout += text
        if self._layout.strip():
            text, self._layout = self._layout, ""
            if not self.stack:
                self._push("response", self._n_ids - 1)
            self._emit("response", text)

    def _emit(self, channel: str, text: str) -> None:
        if channel in self._texts:
            self._texts[channel].append(text)
        if self._deltas and self._deltas[-1].channel == channel:
            self._deltas[-1] = Delta(channel, self._deltas[-1].text + text)
        elif text:
            self._deltas.append(Delta(channel, text))
