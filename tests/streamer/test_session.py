"""Conversations on a random checkpoint: what is computed, what is kept, what an interruption leaves."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from storage.errors import StorageError
from streamer import LLM, EngineOptions, SamplingParams, Session
from streamer.config.errors import ContextLimitError
from streamer.session import Answer
from tests.checkpoints import write_checkpoint
from tests.tokenizers import write_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, vocab=768)
    write_tokenizer(directory, 768)
    with LLM(directory, EngineOptions(slots=3, prefill_chunk=16, context_tokens=400)) as model:
        yield model


@pytest.fixture
def session(llm: LLM) -> Session:
    return llm.session(params=GREEDY)


def _answer(session: Session, text: str) -> Answer:
    *_, last = session.send(text)
    assert isinstance(last, Answer)
    return last


def test_second_turn_computes_only_what_is_new(session: Session, llm: LLM) -> None:
    first = _answer(session, "one")
    computed = session.context_used
    before = llm.engine.stats.prefill_tokens + llm.engine.stats.decode_tokens
    expected = session.pending_tokens("two")
    second = _answer(session, "two")
    assert first.usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second.usage["prompt_tokens_details"] == {"cached_tokens": computed}
    # the pending prompt, and every generated token but the last, whose logits nobody asked for
    spent = llm.engine.stats.prefill_tokens + llm.engine.stats.decode_tokens - before
    assert spent == expected + len(second.token_ids) - 1


def test_turns_equal_one_reading_of_the_whole_prompt(session: Session, llm: LLM) -> None:
    """Feeding turn by turn gives what a fresh model gives for all ids at once."""
    _answer(session, "one")
    session.conversation.add_user("two")
    prompt = session.conversation.prompt_ids()
    *_, answer = session.answer()
    (fresh,) = llm.generate(prompt, replace(GREEDY, max_tokens=12))
    assert isinstance(answer, Answer)
    assert answer.token_ids == fresh.outputs[0].token_ids


@pytest.mark.parametrize("steps", [1, 2, 5, 9, 14])
def test_cancel_keeps_text_and_a_coherent_state(session: Session, llm: LLM, steps: int) -> None:
    events = session.send("a question of some length, so that its prompt takes more than one chunk")
    for _ in range(steps):
        next(events)
    llm.cancel()
    *_, answer = events
    assert isinstance(answer, Answer)
    assert answer.finish_reason == "cancelled"
    session.conversation.add_user("and now?")
    prompt = session.conversation.prompt_ids()
    *_, follow = session.answer()
    (fresh,) = llm.generate(prompt, GREEDY)
    assert isinstance(follow, Answer)
    assert follow.token_ids == fresh.outputs[0].token_ids
    assert follow.usage["prompt_tokens_details"] != {"cached_tokens": 0} or steps == 1


def test_cancel_before_anything_is_computed_forgets_the_turn(session: Session, llm: LLM) -> None:
    events = session.send("hello")
    next(events)
    llm.cancel()
    *_, answer = events
    assert isinstance(answer, Answer)
    assert session.conversation.messages() == []


def test_abandoned_generator_keeps_what_was_said(session: Session) -> None:
    events = session.send("hello")
    for event in events:
        if getattr(event, "text", ""):
            break
    events.close()
    roles = [message["role"] for message in session.conversation.messages()]
    assert roles == ["user", "assistant"]
    assert _answer(session, "again").finish_reason in ("stop", "length")


def test_context_limit_refuses_and_forgets_only_that_turn(session: Session) -> None:
    _answer(session, "one")
    messages = session.conversation.messages()
    with pytest.raises(ContextLimitError, match="Nothing was cut"):
        next(session.send("word " * 400))
    assert session.conversation.messages() == messages
    assert _answer(session, "two").finish_reason in ("stop", "length")


def test_failed_read_fails_the_turn_and_not_the_session(
    session: Session, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise StorageError("layer 3: read failed")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model.experts, "open", broken)
        with pytest.raises(StorageError):
            list(session.send("hello"))
    assert session.conversation.messages() == []
    assert _answer(session, "hello").finish_reason in ("stop", "length")


def test_thinking_budget_closes_the_channel(llm: LLM) -> None:
    session = llm.session(params=replace(GREEDY, max_tokens=60), max_think_tokens=5)
    answer = _answer(session, "hello")
    closing = [llm.tokenizer.close, *llm.tokenizer.encode("think"), llm.tokenizer.sep, llm.tokenizer.open]
    at = answer.token_ids.index(llm.tokenizer.close)
    assert at <= 8  # five thought tokens; a marker that the model began by itself may take a few more
    assert answer.token_ids[at : at + len(closing)] == closing


def test_settings_change_what_was_read(session: Session) -> None:
    _answer(session, "one")
    session.conversation.set_thinking(False)
    assert _answer(session, "two").usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_stop_string_in_the_response(llm: LLM) -> None:
    session = llm.session(params=replace(GREEDY, max_tokens=40), thinking=False)
    full = _answer(session, "hello").message.content
    if len(full) < 4:
        pytest.skip("the random model said nothing")
    stop = full[2:4]
    session = llm.session(params=replace(GREEDY, max_tokens=40, stop=(stop,)), thinking=False)
    shown = "".join(getattr(event, "text", "") for event in session.send("hello"))
    assert shown == full[: full.index(stop)]
