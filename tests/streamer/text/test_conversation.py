"""The conversation: generated ids are kept, prompts only grow, interrupted answers are ended by rule."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.config.errors import UsageError
from streamer.text.answer import Answer
from streamer.text.chat import render
from streamer.text.closing import end_thinking
from streamer.text.conversation import Conversation
from streamer.text.parser import OutputParser
from streamer.text.tokenizer import Tokenizer

OPEN, CLOSE, SEP, EOM, EOS = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]"
MARKERS = {OPEN: 515, CLOSE: 516, SEP: 517, EOM: 514, EOS: 513}
TO_RESPONSE = [CLOSE, "think", SEP, OPEN, "response", SEP]
END = [CLOSE, "response", SEP, CLOSE, "message", SEP, EOM]
EMPTY = [OPEN, "response", SEP, CLOSE, "response", SEP]
END_MESSAGE = [CLOSE, "message", SEP, EOM]
TOOLS = [CLOSE, "response", SEP, OPEN, "tools", SEP]
CALL = [OPEN, "call", ' tool="f" index="1"', SEP]
END_CALL = [CLOSE, "call", SEP, CLOSE, "tools", SEP, *END_MESSAGE]
PREFIX = [OPEN, "message", " role", '="', "assistant", '"', SEP, OPEN, "think", SEP]
ARGUMENT = [OPEN, "argument", ' key="k" type="string"', SEP]


def ids_of(tokenizer: Tokenizer, pieces: list[Any]) -> list[int]:
    """Markers by name, texts encoded each on its own, bytes as single tokens."""
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            ids += list(piece)
        else:
            ids += [MARKERS[piece]] if piece in MARKERS else tokenizer.encode(piece)
    return ids


def test_a_turn_extends_what_was_read_and_equals_the_rendered_history(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer, system="be brief")
    conversation.add_user("hello")
    first = conversation.prompt_ids()
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert first == render(messages, tokenizer=tokenizer)
    generated = ids_of(tokenizer, ["why", *TO_RESPONSE, " world", *END])
    parsed = conversation.add_generated(generated, "stop")
    assert (parsed.reasoning, parsed.content) == ("why", " world")
    conversation.add_user("more")
    second = conversation.prompt_ids()
    assert second[: len(first) + len(generated)] == first + generated
    messages += [
        {"role": "assistant", "reasoning_content": "why", "content": " world"},
        {"role": "user", "content": "more"},
    ]
    assert second == render(messages, tokenizer=tokenizer)
    assert conversation.messages() == messages


def test_generated_ids_are_never_encoded_again(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer, thinking=False)
    conversation.add_user("hi")
    first = conversation.prompt_ids()
    generated = ids_of(tokenizer, [b"hello", *END])  # the encoder would write one token
    assert conversation.add_generated(generated, "stop").content == "hello"
    conversation.add_user("more")
    assert conversation.prompt_ids()[: len(first) + len(generated)] == first + generated


INTERRUPTED: list[tuple[list[Any], list[Any]]] = [
    # in think, in response, between them, behind the response
    (["why"], [CLOSE, "think", SEP, *EMPTY, *END_MESSAGE]),
    ([], [CLOSE, "think", SEP, *EMPTY, *END_MESSAGE]),
    (["why", *TO_RESPONSE, "ok"], END),
    (["why", *TO_RESPONSE], END),
    (["why", CLOSE, "think", SEP], [*EMPTY, *END_MESSAGE]),
    (["why", *TO_RESPONSE, "ok", CLOSE, "response", SEP], END_MESSAGE),
    # in the end of the message
    (["why", *TO_RESPONSE, "ok", *END[:-1]], [EOM]),
    (["why", *TO_RESPONSE, "ok", *END[:3], CLOSE, "message"], [SEP, EOM]),
    (["why", *TO_RESPONSE, "ok", *END[:3], CLOSE, "mess"], ["age", SEP, EOM]),
    # in a half-written tag: completed the way the model writes it
    (["why", CLOSE], ["think", SEP, *EMPTY, *END_MESSAGE]),
    (["why", CLOSE, "th"], ["ink", SEP, *EMPTY, *END_MESSAGE]),
    (["why", CLOSE, "think"], [SEP, *EMPTY, *END_MESSAGE]),
    (["why", OPEN], ["response", SEP, *END]),
    (["why", *TO_RESPONSE, "ok", CLOSE], ["response", SEP, *END_MESSAGE]),
    (["why", *TO_RESPONSE, "ok", CLOSE, "resp"], ["on", "se", SEP, *END_MESSAGE]),
    (["why", *TO_RESPONSE, "ok", CLOSE, b"r"], ["esponse", SEP, *END_MESSAGE]),  # not the usual tokens
    (["why", *TO_RESPONSE, "ok", CLOSE, "response", SEP, OPEN], ["tools", SEP, CLOSE, "tools", SEP, *END_MESSAGE]),
    # a stop string or a cancelled [EOS]
    (["why", *TO_RESPONSE, "ok", EOS], END),
    # in tools
    (["why", *TO_RESPONSE, *TOOLS], [CLOSE, "tools", SEP, *END_MESSAGE]),
    (["why", *TO_RESPONSE, *TOOLS, OPEN, "call"], [SEP, *END_CALL]),
    (["why", *TO_RESPONSE, *TOOLS, OPEN, 'call tool="f'], ['"', SEP, *END_CALL]),
    (["why", *TO_RESPONSE, *TOOLS, OPEN, "call to"], ['=""', SEP, *END_CALL]),
    (
        ["why", *TO_RESPONSE, *TOOLS, *CALL, *ARGUMENT, "x"],
        [CLOSE, "argument", SEP, *END_CALL],
    ),
    # the model began another message
    (["why", *TO_RESPONSE, "ok", OPEN, "message", SEP, "x"], END_MESSAGE),
    # ended by the stop id: kept as it is, whatever it looks like
    (["why", EOM], []),
    (["why", EOM, "x"], [EOM]),  # an engine told to go on behind the stop id
    (["why", *TO_RESPONSE, "ok", *END], []),
]  # fmt: skip


@pytest.mark.parametrize(("pieces", "closing"), INTERRUPTED)
def test_interrupted_answers_are_ended_by_appending(
    tokenizer: Tokenizer, pieces: list[Any], closing: list[Any]
) -> None:
    conversation = Conversation(tokenizer)
    conversation.add_user("hi")
    first = conversation.prompt_ids()
    generated = ids_of(tokenizer, pieces)
    conversation.add_generated(generated, "length")
    conversation.add_user("more")
    more = render(
        [{"role": "user", "content": "more"}], tokenizer=tokenizer, thinking=False, add_generation_prompt=False
    )
    assert conversation.prompt_ids() == first + generated + ids_of(tokenizer, closing) + more + ids_of(
        tokenizer, PREFIX
    )


PIECES = st.sampled_from(
    [
        *MARKERS,
        "think",
        "response",
        "tools",
        "call",
        "argument",
        "message",
        ' tool="f"',
        ' key="',
        "th",
        "re",
        "=",
        '"',
        " a",
    ]
)


@settings(deadline=None)
@given(
    answers=st.lists(st.lists(PIECES | st.integers(0, 511), max_size=14), min_size=1, max_size=3),
    thinking=st.booleans(),
)
def test_every_prompt_strictly_extends_what_was_read(
    tokenizer: Tokenizer, answers: list[list[Any]], thinking: bool
) -> None:
    conversation = Conversation(tokenizer, thinking=thinking)
    read: list[int] = []
    for pieces in answers:
        conversation.add_user("x")
        prompt = conversation.prompt_ids()
        assert len(prompt) > len(read)
        assert prompt[: len(read)] == read
        generated = [i for piece in pieces for i in ([piece] if isinstance(piece, int) else ids_of(tokenizer, [piece]))]
        conversation.add_generated(generated, "length")
        read = prompt + generated
        answer = Answer.read(generated, thinking, "length", tokenizer)
        assert [*answer.generated, *answer.closing][-1] == MARKERS[EOM]
        parser = OutputParser(tokenizer, thinking)
        for token_id in answer.generated + answer.closing:
            parser.push(token_id)
        assert (parser.ended, parser.stack, parser.half) == ("stop", [], None)


def test_switching_thinking_off_drops_thoughts_and_keeps_the_other_ids(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer)
    conversation.add_user("hi")
    thinking_prompt = conversation.prompt_ids()
    generated = ids_of(tokenizer, ["why", *TO_RESPONSE, b"hello", *TOOLS, *CALL, *ARGUMENT, b"think"])
    conversation.add_generated(generated, "cancel")
    conversation.add_tool_result("done")
    with_thoughts = conversation.prompt_ids()
    conversation.set_thinking(False)
    prompt = conversation.prompt_ids()
    response = [OPEN, "response", SEP, b"hello", *TOOLS, *CALL, *ARGUMENT, b"think", CLOSE, "argument", SEP, *END_CALL]
    body = ids_of(tokenizer, response)
    assert contains(prompt, body)
    assert not contains(prompt, tokenizer.encode("why"))
    assert prompt[-7:] == ids_of(tokenizer, [SEP, OPEN, "response", SEP])
    conversation.set_thinking(True)
    assert conversation.prompt_ids() == with_thoughts
    assert with_thoughts[: len(thinking_prompt) + len(generated)] == thinking_prompt + generated


def test_switching_thinking_on_puts_an_empty_thought_in_front(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer, thinking=False)
    conversation.add_user("hi")
    conversation.add_generated(ids_of(tokenizer, ["ok"]), "length")
    conversation.add_user("more")
    conversation.set_thinking(True)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "more"},
    ]
    assert conversation.prompt_ids() == render(messages, tokenizer=tokenizer)


def contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[at : at + len(part)] == part for at in range(len(ids)))


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda c: c.set_effort("max"), {"effort": "max"}),
        (lambda c: c.set_system("other"), {"system": "other"}),
        (lambda c: c.set_system(None), {}),
        (lambda c: c.set_thinking(False), {"thinking": False}),
    ],
)
def test_a_changed_setting_gives_the_prompt_of_that_setting(
    tokenizer: Tokenizer, change: Callable[[Conversation], None], options: dict[str, Any]
) -> None:
    changed = Conversation(tokenizer, **({"system": "s"} if "system" in options else {}))
    fresh = Conversation(tokenizer, **options)
    changed.add_user("hi")
    change(changed)
    fresh.add_user("hi")
    assert changed.prompt_ids() == fresh.prompt_ids()


def test_tool_results_are_put_into_the_order_of_the_calls(tokenizer: Tokenizer) -> None:
    calls = [
        [OPEN, "call", f' tool="{name}" index="{index}"', SEP, CLOSE, "call", SEP]
        for index, name in enumerate("fg", start=1)
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    conversation = Conversation(tokenizer, tools=tools)
    conversation.add_user("hi")
    conversation.add_generated(
        ids_of(tokenizer, ["why", *TO_RESPONSE, *TOOLS, *calls[0], *calls[1], CLOSE, "tools", SEP, *END_MESSAGE]),
        "stop",
    )
    conversation.add_tool_result("two", tool_call_id="call_2")
    conversation.add_tool_result("one", tool_call_id="call_1")
    assert conversation.prompt_ids() == render(conversation.messages(), tokenizer=tokenizer, tools=tools)
    text = tokenizer.decode(conversation.prompt_ids())
    assert text.index('tool="f" index="1"<|sep|>one') < text.index('tool="g" index="2"<|sep|>two')


def test_what_is_not_due_is_refused_and_changes_nothing(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer)
    with pytest.raises(UsageError, match="found an empty conversation"):
        conversation.prompt_ids()
    with pytest.raises(UsageError, match="expected the tool's name"):
        conversation.add_tool_result("x")
    conversation.add_user("hi")
    with pytest.raises(UsageError, match="token id 768"):
        conversation.add_generated([768], "stop")
    conversation.add_generated([], "cancel")
    with pytest.raises(UsageError, match="found an answer"):
        conversation.add_generated([], "stop")
    with pytest.raises(UsageError, match="surrogate"):
        conversation.add_user("\ud800")
    with pytest.raises(UsageError, match="surrogate"):
        conversation.set_system("\ud800")
    with pytest.raises(UsageError, match="expected one of low"):
        conversation.set_effort("huge")
    with pytest.raises(UsageError, match="expected one of low"):
        Conversation(tokenizer, effort="huge")
    assert [message["role"] for message in conversation.messages()] == ["user", "assistant"]


def test_a_saved_conversation_continues_with_the_same_ids(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer, system="s", tools=[{"name": "f"}], effort="max")
    conversation.add_user("hi")
    conversation.add_generated(ids_of(tokenizer, ["why", *TO_RESPONSE, b"hello", *TOOLS, *CALL]), "cancel")
    conversation.add_tool_result("done")
    saved = json.loads(json.dumps(conversation.state()))
    restored = Conversation.from_state(tokenizer, saved)
    assert restored.prompt_ids() == conversation.prompt_ids()
    assert restored.messages() == conversation.messages()
    for damage in (
        {},
        {**saved, "turns": [{}]},
        {**saved, "turns": [{"ids": 3, "thinking": True, "finish_reason": ""}]},
    ):
        with pytest.raises(UsageError, match="conversation state"):
            Conversation.from_state(tokenizer, damage)


@pytest.mark.parametrize(
    ("pieces", "ids"),
    [
        (["why"], TO_RESPONSE),
        (["why", CLOSE, "th"], ["ink", *TO_RESPONSE[2:]]),
        (["why", CLOSE, "think", SEP], [OPEN, "response", SEP]),
        (["why", CLOSE, "think", SEP, OPEN, "resp"], ["on", "se", SEP]),
        (["why", *TO_RESPONSE, "ok"], []),
        (["why", EOM], []),
    ],
)
def test_a_limit_on_thinking_moves_on_to_the_response(tokenizer: Tokenizer, pieces: list[Any], ids: list[Any]) -> None:
    parser = OutputParser(tokenizer, thinking=True)
    for token_id in ids_of(tokenizer, pieces):
        parser.push(token_id)
    assert end_thinking(parser, tokenizer) == ids_of(tokenizer, ids)
    assert parser.done or parser.stack == ["response"]


def test_undo_and_reset(tokenizer: Tokenizer) -> None:
    conversation = Conversation(tokenizer, system="s")
    conversation.add_user("hi")
    first = conversation.prompt_ids()
    conversation.add_generated(ids_of(tokenizer, ["why"]), "length")
    before = conversation.messages()
    conversation.add_user("a")
    conversation.add_generated([], "cancel")
    assert conversation.undo()
    assert conversation.messages() == before
    conversation.reset()
    assert not conversation.undo()
    conversation.add_user("hi")
    assert conversation.prompt_ids() == first
