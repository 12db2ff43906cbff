"""The public API on a random checkpoint: batches, streams, stops, logprobs, token ids without a tokenizer."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamer import LLM, EngineOptions, RequestOutput, SamplingParams
from streamer.config.errors import ContextLimitError, NumericsError, TokenizerError, UsageError
from tests.checkpoints import write_checkpoint
from tests.integration.runs import same_bits
from tests.tokenizers import write_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=10)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, vocab=768)
    write_tokenizer(path, 768)
    return path


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, EngineOptions(slots=4, prefill_chunk=8, context_tokens=300)) as model:
        yield model


def _finish(events: Iterator[str | RequestOutput]) -> tuple[str, RequestOutput]:
    *texts, last = events
    assert isinstance(last, RequestOutput)
    return "".join(text for text in texts if isinstance(text, str)), last


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_request_in_company_is_the_request_alone(llm: LLM, params: SamplingParams) -> None:
    """Prompts of different lengths, so that prefill chunks of some run beside decode steps of others."""
    prompts = ["short", "a rather longer prompt, which takes several chunks of eight tokens", "x"]
    together = llm.generate(prompts, params)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, params)
        assert output.prompt == prompt
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert output.outputs[0].text == alone.outputs[0].text


def test_more_prompts_than_memory_has_room_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time, in order, with the same results; and a bad prompt is found before the first token."""
    prompts = ["one", "two, which is longer", "three", "four", "five"]
    whole = llm.generate(prompts, GREEDY)
    monkeypatch.setattr(type(llm.memory), "max_sequences", 2)
    steps = llm.engine.stats.steps
    with pytest.raises(UsageError):
        llm.generate([*prompts, ""], GREEDY)
    assert llm.engine.stats.steps == steps
    narrow = llm.generate(prompts, GREEDY)
    assert [output.outputs[0] for output in narrow] == [output.outputs[0] for output in whole]


def test_stream_is_generate(llm: LLM) -> None:
    text, output = _finish(llm.stream("hello there", GREEDY))
    (whole,) = llm.generate("hello there", GREEDY)
    assert text == output.outputs[0].text == whole.outputs[0].text
    assert output.outputs[0].finish_reason == "length"
    assert output.usage == {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": 10,
        "total_tokens": len(output.prompt_token_ids) + 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_stop_id_and_ignore_eos(llm: LLM) -> None:
    (free,) = llm.generate("hello", GREEDY)
    ids = free.outputs[0].token_ids
    third = ids[2]
    (stopped,) = llm.generate("hello", replace(GREEDY, stop_token_ids=(third,)))
    end = ids.index(third)
    assert stopped.outputs[0].token_ids == ids[: end + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", third)
    (ignored,) = llm.generate("hello", replace(GREEDY, stop_token_ids=(third,), ignore_eos=True))
    assert ignored.outputs[0].token_ids == ids


def test_stop_string_is_cut_from_the_text(llm: LLM) -> None:
    text, _ = _finish(llm.stream("hello", replace(GREEDY, max_tokens=40)))
    stop = text[3:6]
    shown, output = _finish(llm.stream("hello", replace(GREEDY, max_tokens=40, stop=(stop,))))
    assert shown == output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_logprobs_are_those_of_the_logits(llm: LLM) -> None:
    rows: dict[int, np.ndarray] = {}

    def keep(first: int, logits: np.ndarray) -> None:
        rows.update((first + at, row.astype(np.float64)) for at, row in enumerate(logits))

    _, output = _finish(llm.stream("hello", replace(SAMPLED, logprobs=3), on_logits=keep))
    prompt = len(output.prompt_token_ids)
    entries = output.outputs[0].logprobs
    assert entries is not None
    assert [entry.token_id for entry in entries] == output.outputs[0].token_ids
    for at, entry in enumerate(entries):
        row = rows[prompt - 1 + at]
        expected = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert entry.logprob == pytest.approx(expected[entry.token_id])
        assert [value for _, value in entry.top] == pytest.approx(np.sort(expected)[::-1][:3])
    assert sorted(rows) == list(range(prompt + len(entries) - 1))


def test_token_ids_need_no_tokenizer(directory: Path, tmp_path: Path, llm: LLM) -> None:
    for path in directory.iterdir():
        if path.name not in ("tiktoken.model", "tokenizer_config.json"):
            (tmp_path / path.name).symlink_to(path)
    ids = [3, 17, 101]
    with LLM(tmp_path, EngineOptions(context_tokens=300)) as bare:
        (output,) = bare.generate(ids, GREEDY)
        assert output.outputs[0].text is None
        assert len(output.outputs[0].token_ids) == 10
        with pytest.raises(TokenizerError, match=r"tiktoken\.model"):
            bare.generate("text", GREEDY)
        with pytest.raises(TokenizerError, match="--stop"):
            bare.generate(ids, replace(GREEDY, stop=("x",)))


def test_slots_do_not_change_a_bit(directory: Path) -> None:
    seen = []
    for slots, chunk in ((2, 3), (8, 64)):
        with LLM(directory, EngineOptions(slots=slots, prefill_chunk=chunk)) as model:
            rows: list[np.ndarray] = []
            _finish(model.stream("the same text for both", GREEDY, on_logits=lambda _, x, r=rows: r.append(x.copy())))
            seen.append(np.concatenate(rows))
    assert same_bits(*seen)


def test_cancel_keeps_what_was_generated(llm: LLM) -> None:
    events = llm.stream("hello", replace(GREEDY, max_tokens=200))
    for _ in range(6):
        next(events)
    llm.cancel()
    _, output = _finish(events)
    assert output.outputs[0].finish_reason == "cancelled"
    (free,) = llm.generate("hello", GREEDY)
    ids = output.outputs[0].token_ids
    assert ids == free.outputs[0].token_ids[: len(ids)]
    assert len(ids) >= 4


def test_cancel_in_the_last_layer_is_not_lost(llm: LLM) -> None:
    """Behind the last check of a step: that step still gives its token, the next one stops before its first layer."""
    steps = []

    def press(layer: int) -> None:
        if layer == llm.config.n_layers - 1:
            steps.append(layer)
            if len(steps) == 4:
                llm.cancel()

    llm.engine.on_layer = press
    try:
        _, output = _finish(llm.stream([3, 17], replace(GREEDY, max_tokens=200)))
    finally:
        llm.engine.on_layer = None
    assert output.outputs[0].finish_reason == "cancelled"
    assert len(output.outputs[0].token_ids) == len(steps) == 4
    assert llm.generate([3, 17], GREEDY)[0].outputs[0].finish_reason == "length"  # the cancel is spent


def test_nan_is_an_error_that_names_the_layer(llm: LLM) -> None:
    weights = llm.engine.model.trunk.layer(3).input_norm
    kept = weights[0].copy()
    weights[0] = np.nan
    try:
        with pytest.raises(NumericsError, match="layer 3"):
            llm.generate("hello", GREEDY)
    finally:
        weights[0] = kept
    assert not llm.engine.running
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 10


def test_nan_in_the_head_is_an_error_too(llm: LLM) -> None:
    head = llm.engine.model.trunk.head().lm_head
    kept = head[5, 0]
    head[5, 0] = 0x7FC0  # bf16 NaN in one row: greedy would choose token 0 for ever
    try:
        with pytest.raises(NumericsError, match="lm_head"):
            llm.generate("hello", GREEDY)
    finally:
        head[5, 0] = kept
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 10


def test_one_request_at_a_time(llm: LLM) -> None:
    """A second one is refused before it changes anything, in this thread and in another; then the first goes on."""
    alone = _finish(llm.stream("hello", GREEDY))[1].outputs[0]
    events = llm.stream("hello", GREEDY)
    next(events)
    session = llm.session(params=GREEDY)
    with pytest.raises(UsageError, match="busy"):
        llm.generate("other", GREEDY)
    with pytest.raises(UsageError, match="busy"):
        next(llm.stream("other", GREEDY))
    with pytest.raises(UsageError, match="busy"):
        next(session.send("other"))
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="busy"):
        pool.submit(llm.generate, "other", GREEDY).result()
    assert session.conversation.messages() == []
    assert _finish(events)[1].outputs[0] == alone
    next(llm.stream("other", GREEDY)).strip()  # an abandoned iterator gives the model back
    assert llm.generate("hello", GREEDY)[0].outputs[0] == alone


def test_closed_model_says_so(directory: Path) -> None:
    model = LLM(directory, EngineOptions(context_tokens=100))
    session = model.session()
    model.close()
    model.close()
    for use in (lambda: model.generate("x"), lambda: next(model.stream("x")), lambda: next(session.send("x"))):
        with pytest.raises(UsageError, match="closed"):
            use()


@pytest.mark.parametrize(
    "prompts",
    [5, None, {"a": 1}, [1, "a"], ["a", 1], [True], [1.5], [None], ["a", None], [[1], [2, "b"]]],
    ids=str,
)
def test_what_is_not_a_prompt_is_refused(llm: LLM, prompts: object) -> None:
    with pytest.raises(UsageError, match="prompts"):
        llm.generate(prompts)  # type: ignore[arg-type]


def test_numpy_integers_are_token_ids(llm: LLM) -> None:
    ids = np.array([3, 17, 101])
    assert llm.generate(list(ids), GREEDY)[0].prompt_token_ids == [3, 17, 101]


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ("", UsageError, "empty"),
        ([], UsageError, "list of token ids"),
        ([5, 768], UsageError, "Token id 768 at position 1"),
        ([-1], UsageError, "Token id -1"),
        (list(range(300)), ContextLimitError, "holds 300 tokens"),
    ],
    ids=["empty", "none", "beyond", "negative", "long"],
)
def test_bad_prompts_are_sentences(llm: LLM, prompt: str | list[int], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        llm.generate(prompt, GREEDY)


def test_bad_options_are_sentences(directory: Path) -> None:
    for bad in (0, -1, 1.5, "4", True):
        with pytest.raises(UsageError, match="--slots"):
            EngineOptions(slots=bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--prefill-chunk"):
        EngineOptions(prefill_chunk=0)
    with pytest.raises(UsageError, match="--trunk: expected auto, bf16, int8, int4, found 'fp8'"):
        EngineOptions(trunk="fp8")
    with pytest.raises(UsageError, match=r"the budget is 0\.10 GiB"):
        LLM(directory, EngineOptions(memory="0.1GiB"))
    with pytest.raises(UsageError, match="at most 4,096"):
        LLM(directory, EngineOptions(context_tokens=5000))
