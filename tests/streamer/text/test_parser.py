"""The output parser on answers written as ids: the format, and every way a model was seen to leave it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.config.errors import UsageError
from streamer.text.chat import render
from streamer.text.parsed import ParsedMessage
from streamer.text.parser import OutputParser
from streamer.text.tokenizer import Tokenizer

OPEN, CLOSE, SEP, EOM, EOS = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]"
MARKERS = {OPEN: 515, CLOSE: 516, SEP: 517, EOM: 514, EOS: 513}
TO_RESPONSE = [CLOSE, "think", SEP, OPEN, "response", SEP]
END = [CLOSE, "response", SEP, CLOSE, "message", SEP, EOM]
TOOLS = [CLOSE, "response", SEP, OPEN, "tools", SEP]
END_TOOLS = [CLOSE, "tools", SEP, CLOSE, "message", SEP, EOM]


def ids_of(tokenizer: Tokenizer, pieces: list[Any]) -> list[int]:
    """Markers by name, texts encoded each on its own, bytes as single tokens."""
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            ids += list(piece)  # the first 256 ranks are the bytes
        else:
            ids += [MARKERS[piece]] if piece in MARKERS else tokenizer.encode(piece)
    return ids


def parse(tokenizer: Tokenizer, ids: list[int], thinking: bool = True) -> tuple[ParsedMessage, OutputParser]:
    """Parse, and check what must hold for any ids: the deltas add up to the message and hold no marker."""
    parser = OutputParser(tokenizer, thinking)
    deltas = [delta for token_id in ids for delta in parser.push(token_id)]
    message = parser.finish("stop")
    assert "".join(delta.text for delta in deltas if delta.channel == "thinking") == (message.reasoning or "")
    assert "".join(delta.text for delta in deltas if delta.channel == "response") == message.content
    assert all(delta.text for delta in deltas)
    return message, parser


# pieces, reasoning, content, complete
ANSWERS: list[tuple[list[Any], str | None, str, bool]] = [
    (["why", *TO_RESPONSE, "ok", *END], "why", "ok", True),
    (["\n why \n", *TO_RESPONSE, "    code\n\n", *END], "\n why \n", "    code\n\n", True),  # nothing is stripped
    ([*TO_RESPONSE, *END], "", "", True),
    (["why"], "why", "", False),  # cut in think: reasoning only
    (["why", *TO_RESPONSE, "ok"], "why", "ok", False),
    ([], "", "", False),
    # The model skips the close, or the response, or everything.
    (["why", OPEN, "response", SEP, "ok", *END], "why", "ok", True),
    (["why", CLOSE, "message", SEP, EOM], "why", "", True),
    (["why", EOM], "why", "", True),
    (["why", EOS], "why", "", True),
    (["why", CLOSE, "think", SEP, '{"a":1}', CLOSE, "message", SEP, EOM], "why", '{"a":1}', True),
    (["why", CLOSE, "think", SEP, "\n\n", OPEN, "response", SEP, "ok", *END], "why", "ok", True),
    (["why", *TO_RESPONSE, "ok", CLOSE, "response", SEP, "\n", CLOSE, "message", SEP, EOM], "why", "ok", True),
    (["why", *TO_RESPONSE, "ok", CLOSE, "message", SEP, "lost", EOM], "why", "ok", True),
    (["why", *TO_RESPONSE, "ok", OPEN, "message", ' role="user"', SEP, "x", EOM], "why", "ok", True),
    (["a", CLOSE, "think", SEP, OPEN, "think", SEP, "b", *TO_RESPONSE, "ok", *END], "ab", "ok", True),
    (["why", CLOSE, "response", SEP, "more", *TO_RESPONSE, "ok", *END], "whymore", "ok", True),
    # The separator is missing.
    (["why", CLOSE, "think", OPEN, "response", SEP, "ok", CLOSE, "response", EOM], "why", "ok", True),
    # Sequences that are no boundary keep their words and drop their markers.
    (["a", CLOSE, "thinking", SEP, "b", *TO_RESPONSE, "ok", *END], "athinkingb", "ok", True),
    (["a", OPEN, "foo", SEP, "b", *TO_RESPONSE, "ok", *END], "afoob", "ok", True),
    (["a", SEP, "b", *TO_RESPONSE, "ok", *END], "ab", "ok", True),
    (["a", CLOSE, CLOSE, "think", SEP, OPEN, "response", SEP, "ok", *END], "a", "ok", True),
    (["a", CLOSE, "thi", OPEN, "response", SEP, "ok", *END], "athi", "ok", True),
    (["a", CLOSE, "think", ' x="1"', SEP, "b", EOM], 'athink x="1"b', "", True),
    (["a", OPEN, "argument", ' key="k"', SEP, "b", EOM], 'aargument key="k"b', "", True),
    (["a", OPEN, "call", " tool=x", SEP, "b", EOM], "acall tool=xb", "", True),
    (["a", CLOSE, EOM], "a", "", True),
    # A half-written tag at the end is not text, whatever ends it.
    (["a", CLOSE], "a", "", False),
    (["a", CLOSE, "th"], "a", "", False),
    (["a", CLOSE, "think"], "a", "", False),
    (["a", *TO_RESPONSE, "ok", CLOSE, "resp"], "a", "ok", False),
    # Text about markers is text.
    (["a <|close|>", *TO_RESPONSE, "<|open|>tools<|sep|>", *END], "a <|close|>", "<|open|>tools<|sep|>", True),
    # Characters split over tokens, cut by a marker, cut by the end.
    ([b"\xe4", b"\xb8\xad", *TO_RESPONSE, b"\xe6\x96", *END], "中", "\ufffd", True),
    (["a", *TO_RESPONSE, "ok", b"\xe6\x96"], "a", "ok", False),
]  # fmt: skip


@pytest.mark.parametrize(("pieces", "reasoning", "content", "complete"), ANSWERS)
def test_channels(tokenizer: Tokenizer, pieces: list[Any], reasoning: str | None, content: str, complete: bool) -> None:
    message, parser = parse(tokenizer, ids_of(tokenizer, pieces))
    assert (message.reasoning, message.content, message.complete) == (reasoning, content, complete)
    assert parser.done == complete
    assert message.tool_calls == []


def test_without_thinking_the_answer_starts_as_response(tokenizer: Tokenizer) -> None:
    message, _ = parse(tokenizer, ids_of(tokenizer, ["ok", *END]), thinking=False)
    assert (message.reasoning, message.content) == (None, "ok")
    message, _ = parse(tokenizer, ids_of(tokenizer, [OPEN, "think", SEP, "why", *TO_RESPONSE, "ok"]), thinking=False)
    assert (message.reasoning, message.content) == ("why", "ok")  # a thought does not leak into the answer


def test_a_tag_may_be_any_tokens(tokenizer: Tokenizer) -> None:
    pieces = ["why", CLOSE, b"think", SEP, OPEN, b"res", "ponse", SEP, "ok", CLOSE, b"respon", b"se", SEP, EOM]
    message, _ = parse(tokenizer, ids_of(tokenizer, pieces))
    assert (message.reasoning, message.content) == ("why", "ok")


def test_deltas_come_as_soon_as_they_are_certain(tokenizer: Tokenizer) -> None:
    parser = OutputParser(tokenizer, thinking=True)
    ids = ids_of(tokenizer, ["hello", CLOSE, "thing", SEP, b"\xc3\xa9"])
    seen = [[(delta.channel, delta.text) for delta in parser.push(token_id)] for token_id in ids]
    hello, close, *thing, sep, first, second = seen
    assert hello == [("thinking", "hello")]
    assert close == sep == first == []
    assert second == [("thinking", "é")]
    assert [delta for deltas in thing for delta in deltas][-1][1].endswith("g")


def call(name: str, *arguments: Any, index: str = "1") -> list[Any]:
    head = [OPEN, "call", f' tool="{name}" index="{index}"', SEP]
    return [*head, *(piece for argument in arguments for piece in argument), CLOSE, "call", SEP]


def argument(key: str, kind: str, value: str) -> list[Any]:
    return [OPEN, "argument", f' key="{key}" type="{kind}"', SEP, value, CLOSE, "argument", SEP]


def test_tool_calls(tokenizer: Tokenizer) -> None:
    calls = [
        *call("f&quot;&amp;lt;", argument("a&amp;b", "string", ' 1 "x" &amp; '), argument("n", "number", "1.5")),
        *call("g", argument("o", "object", '{"k": [1, null]}'), argument("b", "boolean", "true"), index="2"),
        *call("h", index="3"),
    ]
    message, _ = parse(tokenizer, ids_of(tokenizer, ["why", *TO_RESPONSE, "ok", *TOOLS, *calls, *END_TOOLS]))
    assert [(c.name, c.index, c.arguments, c.usable) for c in message.tool_calls] == [
        ('f"&lt;', 1, {"a&b": ' 1 "x" &amp; ', "n": 1.5}, True),  # attributes are unescaped, values are verbatim
        ("g", 2, {"o": {"k": [1, None]}, "b": True}, True),
        ("h", 3, {}, True),
    ]
    assert message.content == "ok"
    sent = message.message()["tool_calls"]
    assert [entry["id"] for entry in sent] == ["call_1", "call_2", "call_3"]
    assert sent[1]["function"] == {"name": "g", "arguments": '{"o": {"k": [1, null]}, "b": true}'}


def test_tool_text_is_readable_while_it_is_written(tokenizer: Tokenizer) -> None:
    parser = OutputParser(tokenizer, thinking=False)
    pieces = [*TOOLS, *call("f", argument("a", "string", "x"), argument("b", "number", "1")), *END_TOOLS]
    deltas = [delta for token_id in ids_of(tokenizer, pieces) for delta in parser.push(token_id)]
    assert {delta.channel for delta in deltas} == {"tools"}
    assert "".join(delta.text for delta in deltas) == "f(a=x, b=1)\n"


def test_calls_that_cannot_be_run_say_so(tokenizer: Tokenizer) -> None:
    calls = [
        *call("f", argument("n", "number", "one"), argument("s", "string", "x")),
        *call("g", ["loose words"]),
        *call("h", [OPEN, "json", ' type="object"', SEP, '{"a": 1}', CLOSE, "json", SEP]),
        OPEN, "call", ' tool="i"', SEP, OPEN, "argument", ' key="k" type="string"', SEP, "cut",
    ]  # fmt: skip
    message, parser = parse(tokenizer, ids_of(tokenizer, ["why", *TO_RESPONSE, *TOOLS, *calls]))
    f, g, h, i = message.tool_calls
    assert (f.arguments, f.undecoded, f.usable) == ({"n": "one", "s": "x"}, ("n",), False)
    assert (g.arguments, g.raw, g.usable) == ({}, "loose words", False)
    assert (h.arguments, h.usable) == ({"a": 1}, True)
    assert (i.index, i.arguments, i.complete, i.usable) == (4, {"k": "cut"}, False, False)
    assert parser.stack == ["tools", "call", "argument"]


def test_calls_with_skipped_tags_are_still_calls(tokenizer: Tokenizer) -> None:
    calls = [
        OPEN, "call", ' tool="f" index="1"', SEP, OPEN, "argument", ' key="a" type="string"', SEP, "x",
        OPEN, "argument", ' key="b" type="string"', SEP, "y",
        OPEN, "call", ' tool="g" index="2"', SEP, EOM,
    ]  # fmt: skip
    message, _ = parse(tokenizer, ids_of(tokenizer, ["why", *TO_RESPONSE, "ok", *calls]))
    assert [(c.name, c.arguments, c.usable) for c in message.tool_calls] == [
        ("f", {"a": "x", "b": "y"}, True),
        ("g", {}, True),
    ]
    assert message.content == "ok"


def test_words_between_calls_are_response_and_whitespace_is_layout(tokenizer: Tokenizer) -> None:
    pieces = [*TO_RESPONSE, "ok", *TOOLS, "\n", *call("f"), "\n", *call("g"), " and so", *END_TOOLS]
    message, _ = parse(tokenizer, ids_of(tokenizer, pieces))
    assert message.content == "ok and so"
    assert [c.name for c in message.tool_calls] == ["f", "g"]


def test_runaway_header_is_given_back(tokenizer: Tokenizer) -> None:
    text = 'call tool="' + "a" * 10_000
    message, parser = parse(tokenizer, ids_of(tokenizer, [OPEN, text]))
    assert message.reasoning == text
    assert parser.half is None


def test_unknown_id_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="token id 768"):
        OutputParser(tokenizer, thinking=True).push(768)


WORDS = st.sampled_from(
    ["think", "response", "tools", "call", "argument", "message", "json", ' tool="', '"', "中", "\n"]
)
TEXT_IDS = st.integers(0, 511)


@settings(deadline=None)
@given(data=st.data())
def test_no_ordinary_text_is_lost_and_no_marker_shown(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Arbitrary ids: the parser never fails, and what it shows are the bytes of ordinary tokens, in order."""
    pieces = data.draw(st.lists(st.sampled_from([*MARKERS]) | WORDS, max_size=30))
    ids = ids_of(tokenizer, pieces) + data.draw(st.lists(TEXT_IDS | st.integers(512, 767), max_size=10))
    message, _ = parse(tokenizer, ids, data.draw(st.booleans()))
    shown = (message.reasoning or "") + message.content
    assert not any(marker in shown for marker in MARKERS)


DIGITS = st.sampled_from(["1", "2", "34"])
TAGS = st.sampled_from(["think", "response", "tools", "call", "json", "thinking"])


@settings(deadline=None)
@given(pieces=st.lists(st.sampled_from([OPEN, CLOSE, SEP, EOS]) | DIGITS | TAGS, max_size=40), thinking=st.booleans())
def test_no_words_are_lost_wherever_the_markers_stand(tokenizer: Tokenizer, pieces: list[str], thinking: bool) -> None:
    parser = OutputParser(tokenizer, thinking)
    deltas = [delta for token_id in ids_of(tokenizer, pieces) for delta in parser.push(token_id)]
    shown = "".join(character for delta in deltas for character in delta.text if character.isdigit())
    assert shown == "".join(piece for piece in pieces if piece.isdigit())


@settings(deadline=None)
@given(texts=st.lists(st.text(max_size=8) | WORDS | st.sampled_from([*MARKERS]), min_size=5, max_size=5))
def test_rendered_answers_parse_back(tokenizer: Tokenizer, texts: list[str]) -> None:
    thought, content, name, key, value = texts
    thought = thought if thought.strip() else ""
    calls = [
        {"type": "function", "function": {"name": "f" + name, "arguments": {"k" + key: value, "z": [value, 1, None]}}},
        {"type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    answer = {"role": "assistant", "reasoning_content": thought, "content": content, "tool_calls": calls}
    user = {"role": "user", "content": "q"}
    prompt = render([user], tokenizer=tokenizer)
    whole = render([user, answer], tokenizer=tokenizer, add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    message, _ = parse(tokenizer, whole[len(prompt) :])
    assert (message.reasoning, message.content, message.complete) == (thought, content, True)
    assert [(c.name, c.arguments, c.usable) for c in message.tool_calls] == [
        ("f" + name, {"k" + key: value, "z": [value, 1, None]}, True),
        ("g", {}, True),
    ]
