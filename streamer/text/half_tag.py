"""A tag that is being written: what may still become one, what it says, and how to complete it (k3-spec §7.1).

A boundary is marker, ordinary text tokens, `<|sep|>`. Until the separator comes, text behind a marker is held only as
long as it can still be one of the format's tags; anything else is given back as text at once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamer.text.tokenizer import Tokenizer
from streamer.text.xtml import parse_attributes

TAGS = ("think", "response", "tools", "call", "argument", "json", "message")
_WITH_ATTRIBUTES = frozenset(("call", "argument", "json", "message"))
MAX_HEADER_BYTES = 4096  # a longer header is not one; without a bound a runaway answer would never be shown

_UNFINISHED = re.compile(r'(?: [^\s="]+="[^"]*")*(?: (?:[^\s="]+(?:=(?:"[^"]*)?)?)?)?')
_ENDINGS = ("", '"', '""', '=""', 'index=""')  # what may be missing behind a tag name; one of them always fits


@dataclass(frozen=True, slots=True)
class Tag:
    """A complete tag with its unescaped attributes."""

    name: str
    is_open: bool
    attributes: dict[str, str]


@dataclass(slots=True)
class HalfTag:
    """A marker and the ordinary tokens behind it so far. `start` is the marker's place in the answer."""

    is_open: bool
    start: int
    ids: list[int] = field(default_factory=list)
    data: bytes = b""

    def push(self, token_id: int, data: bytes) -> bool:
        """Add a token; False when the whole can no longer become a tag."""
        self.ids.append(token_id)
        self.data += data
        return len(self.data) <= MAX_HEADER_BYTES and any(self._fits(name) for name in TAGS)

    def _text(self) -> str:
        return self.data.decode("utf-8", "replace")  # a value may be cut inside a character

    def _fits(self, name: str) -> bool:
        text = self._text()
        if len(text) <= len(name):
            return name.startswith(text)
        takes_attributes = self.is_open and name in _WITH_ATTRIBUTES
        return takes_attributes and text.startswith(name) and _UNFINISHED.fullmatch(text, len(name)) is not None

    def parse(self) -> Tag | None:
        """Return the tag when it is complete up to its separator, else None."""
        text = self._text()
        for name in TAGS:
            if text.startswith(name) and self._fits(name):
                attributes = parse_attributes(text[len(name) :])
                return None if attributes is None else Tag(name, self.is_open, attributes)
        return None

    def missing_ids(self, preferred: Sequence[str], tokenizer: Tokenizer) -> list[int]:
        """Return the tokens that complete the first of `preferred` (then of all tags) that still fits.

        Where the tokens so far begin the tag's usual encoding, the rest of that encoding follows, so that the model
        reads the tag as it always does.
        """
        text = self._text()
        name = next(name for name in (*preferred, *TAGS) if self._fits(name))
        if len(text) <= len(name):
            usual = tokenizer.encode(name)
            if usual[: len(self.ids)] == self.ids:
                return usual[len(self.ids) :]
            return tokenizer.encode(name[len(text) :])
        rest = text[len(name) :]
        return tokenizer.encode(next(end for end in _ENDINGS if parse_attributes(rest + end) is not None))
