"""End an interrupted answer by the format's own rules, appending only (k3-spec §7.3, §7.6).

The state of a K3 sequence cannot be rewound, so what was read stays a prefix of what comes next. An answer that was cut
by the token limit, a cancel, a stop string or `[EOS]` is ended like this:

1. A half-written tag is completed to the innermost element it can still close (or the next channel it can still open),
   and gets its separator.
2. Every open element is closed, innermost first.
3. If no response was begun, an empty one is written: inside think that gives close(think) open(response)
   close(response). After tools none is added, since response stands before tools.
4. close(message) and `<|end_of_msg|>`, or only what is missing of them.

An answer that ended with `<|end_of_msg|>` gets nothing, whatever it looks like.
"""

from streamer.text.parser import OutputParser
from streamer.text.tokenizer import Tokenizer
from streamer.text.xtml import EOM, Segment, close_tag, encode_segments, open_tag


def close_answer(parser: OutputParser, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end the answer `parser` has read, and feed them to it."""
    ids: list[int] = []
    if parser.ended == "stop":
        return ids
    if parser.ended is None and parser.half is not None:
        ids += [*parser.half.missing_ids(_preferred(parser), tokenizer), tokenizer.sep]
        _feed(parser, ids)
    segments: list[Segment] = []
    if parser.ended is None:
        for name in reversed(parser.stack):
            segments += close_tag(name)
        if not parser.opened & {"response", "tools"}:
            segments += [*open_tag("response"), *close_tag("response")]
    if parser.ended != "message":
        segments += close_tag("message")
    rest = encode_segments([*segments, EOM], tokenizer)
    _feed(parser, rest)
    return ids + rest


def end_thinking(parser: OutputParser, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that take an answer from think to response, and feed them: for a limit on thinking tokens.

    Nothing when the answer is already past its think channel. A half-written tag is completed first.
    """
    ids: list[int] = []
    if parser.done or parser.opened & {"response", "tools"}:
        return ids
    if parser.half is not None:
        ids += [*parser.half.missing_ids(_preferred(parser), tokenizer), tokenizer.sep]
        _feed(parser, ids)
    if parser.done or parser.opened & {"response", "tools"}:
        return ids
    segments = [*(close_tag("think") if parser.stack else []), *open_tag("response")]
    rest = encode_segments(segments, tokenizer)
    _feed(parser, rest)
    return ids + rest


def _feed(parser: OutputParser, ids: list[int]) -> None:
    for token_id in ids:
        parser.push(token_id)


def _preferred(parser: OutputParser) -> list[str]:
    """The tags that a half-written one most likely was, best first."""
    if parser.half is None or not parser.half.is_open:
        return [*reversed(parser.stack), "message"]
    if "call" in parser.stack:
        return ["argument", "call"]
    if "tools" in parser.stack:
        return ["call"]
    return ["tools"] if "response" in parser.opened else ["response", "tools"]
