"""Segments of K3's chat format: the four markers, tags, attributes (k3-spec §7.1, §7.2).

A prompt is a list of segments that are encoded one by one and concatenated. Encoding the rendered string instead would
merge tokens across segments and would let text inject markers, so no function here goes from string to ids.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streamer.text.tokenizer import CLOSE, END_OF_MSG, OPEN, SEP, Tokenizer

Attributes = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Segment:
    """One separately encoded piece: a marker's name, or text that is encoded in ordinary mode."""

    text: str
    is_marker: bool = False


_OPEN, _CLOSE, _SEP = Segment(OPEN, True), Segment(CLOSE, True), Segment(SEP, True)
EOM = Segment(END_OF_MSG, True)
"""Ends every message; the stop id when the model writes it."""


def open_tag(tag: str, attributes: Attributes = ()) -> list[Segment]:
    """Return `<|open|>tag key="value"…<|sep|>`: one segment for the tag, four for each attribute."""
    segments = [_OPEN, Segment(tag)]
    for key, value in attributes:
        segments += [Segment(f" {key}"), Segment('="'), Segment(escape(value)), Segment('"')]
    return [*segments, _SEP]


def close_tag(tag: str) -> list[Segment]:
    """Return `<|close|>tag<|sep|>`."""
    return [_CLOSE, Segment(tag), _SEP]


def message(attributes: Attributes, body: Iterable[Segment]) -> list[Segment]:
    """Return a whole message: open with `attributes`, `body`, close, end of message."""
    return [*open_tag("message", attributes), *body, *close_tag("message"), EOM]


def escape(value: str) -> str:
    """Escape an attribute value: only & and the double quote."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """Undo `escape`. The ampersand comes last, so that `&amp;quot;` gives `&quot;`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


_ATTRIBUTE = re.compile(r' ([^\s="]+)="([^"]*)"')
_ATTRIBUTES = re.compile(rf"(?:{_ATTRIBUTE.pattern})*")


def parse_attributes(text: str) -> dict[str, str] | None:
    """Read ` key="value"…` into a dictionary, or None where the text is anything else."""
    if _ATTRIBUTES.fullmatch(text) is None:
        return None
    return {key: unescape(value) for key, value in _ATTRIBUTE.findall(text)}


def encode_segments(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Encode each segment on its own and concatenate. Raises UsageError for text that is not valid Unicode."""
    ids: list[int] = []
    for segment in segments:
        if segment.is_marker:
            ids.append(tokenizer.marker(segment.text))
        else:
            ids += tokenizer.encode(segment.text)
    return ids


def segments_text(segments: Iterable[Segment]) -> str:
    """Return the readable form. It is for people and tests; encoding it does not give the ids."""
    return "".join(segment.text for segment in segments)
