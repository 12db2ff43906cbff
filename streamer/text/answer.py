"""One answer of a conversation, kept as the ids that were generated, never re-encoded from its text.

The ids of a text are not unique: a model may write "hello" as other tokens than the encoder would, and then a
re-encoded answer no longer continues the sequence whose state is in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamer.text.closing import close_answer
from streamer.text.parsed import ParsedMessage
from streamer.text.parser import OutputParser, Span
from streamer.text.tokenizer import Tokenizer
from streamer.text.xtml import EOM, Segment, close_tag, encode_segments, open_tag


@dataclass(frozen=True, slots=True)
class Answer:
    """Generated ids, the ids that end them if they were interrupted, and what they say.

    `thinking` is the mode whose generation prefix the ids continue.
    """

    thinking: bool
    generated: tuple[int, ...]
    closing: tuple[int, ...]
    parsed: ParsedMessage
    spans: tuple[Span, ...] = field(repr=False)

    @classmethod
    def read(cls, ids: Sequence[int], thinking: bool, finish_reason: str, tokenizer: Tokenizer) -> "Answer":
        """Parse `ids` and decide how they end (see `streamer.text.closing`). Raises UsageError for an unknown id."""
        parser = OutputParser(tokenizer, thinking)
        for token_id in ids:
            parser.push(token_id)
        parsed = parser.finish(finish_reason)
        closing = close_answer(parser, tokenizer)
        if not closing and ids[-1] != tokenizer.end_of_msg:
            closing = [tokenizer.end_of_msg]  # generation went on behind the stop id
        return cls(thinking, tuple(ids), tuple(closing), parsed, tuple(parser.spans))

    def message_ids(self, thinking: bool, prefix: Sequence[int], tokenizer: Tokenizer) -> list[int]:
        """Return the whole assistant message in the given mode; `prefix` is that mode's generation prefix.

        In the mode it was generated in, that is prefix, generated and closing ids, so what was fed stays a prefix. In
        the other mode the think channel is dropped, or an empty one put in front, and the insides of the other channels
        keep their ids.
        """
        if thinking == self.thinking:
            return [*prefix, *self.generated, *self.closing]
        ids = encode_segments(open_tag("message", [("role", "assistant")]), tokenizer)
        spans = [span for span in self.spans if span.name != "think"]
        if thinking:
            thoughts = [span for span in self.spans if span.name == "think"]  # only if the model opened one by itself
            spans = (thoughts or [Span("think", 0, 0)]) + spans
        if all(span.name != "response" for span in spans):
            spans.insert(1 if thinking else 0, Span("response", 0, 0))
        source = self.generated + self.closing
        for span in spans:
            ids += encode_segments(open_tag(span.name), tokenizer)
            ids += source[span.start : span.end]
            ids += encode_segments(close_tag(span.name), tokenizer)
        end: list[Segment] = [*close_tag("message"), EOM]
        return ids + encode_segments(end, tokenizer)
