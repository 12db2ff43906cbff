"""The bundled model through the real path: it adds, stops by itself, knows what it was taught, and needs its experts.

Sums alone do not test the routed experts (a model with the wrong nibble order still adds), so text is judged too, and
the trainer's own torch forward is held against the engine.
"""

import json
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from bench.nano.dialogue import held_out_pairs
from streamer import LLM, EngineOptions, SamplingParams
from streamer.config.bundled import BUNDLED
from streamer.session import Answer
from tests.integration.test_oracle_logits import TEXT

GREEDY = SamplingParams(temperature=0.0, max_tokens=120)


@pytest.fixture(scope="module")
def nano() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


def _ask(nano: LLM, question: str, **settings: object) -> Answer:
    *_, answer = nano.session(params=GREEDY, **settings).send(question)  # type: ignore[arg-type]
    assert isinstance(answer, Answer)
    return answer


def test_adds_what_it_never_saw(nano: LLM) -> None:
    """At least 95 of 100 held-out sums right in the response channel, and every answer ends by itself."""
    pairs = random.Random(12).sample(held_out_pairs(), 100)
    answers = [(a + b, _ask(nano, f"What is {a} + {b}?")) for a, b in pairs]
    assert all(answer.finish_reason == "stop" for _, answer in answers)
    right = [re.findall(r"\d+", answer.message.content)[-1:] == [str(total)] for total, answer in answers]
    assert sum(right) >= 95
    assert all(answer.message.reasoning for _, answer in answers)


def test_stays_coherent_over_turns(nano: LLM) -> None:
    session = nano.session(params=GREEDY)
    for question, expected in (("What is 17 + 25?", "42"), ("What is 30 + 12?", "42"), ("What is 8 + 5?", "13")):
        *_, answer = session.send(question)
        assert isinstance(answer, Answer)
        assert re.findall(r"\d+", answer.message.content)[-1] == expected
    assert answer.usage["prompt_tokens_details"] != {"cached_tokens": 0}


def test_answers_without_thinking(nano: LLM) -> None:
    answer = _ask(nano, "What is 2 + 3?", thinking=False)
    assert answer.message.reasoning is None
    assert answer.message.complete
    assert "5" in answer.message.content


def test_introduces_itself(nano: LLM) -> None:
    assert "nano" in _ask(nano, "Who are you?").message.content


def _text_loss(llm: LLM, ids: list[int]) -> float:
    """Mean nats per token."""
    rows: list[np.ndarray] = []
    for _ in llm.stream(ids, SamplingParams(temperature=0.0, max_tokens=1), on_logits=lambda _, x: rows.append(x)):
        pass
    logits = np.concatenate(rows)[: len(ids) - 1].astype(np.float64)
    top = logits.max(axis=1)
    partition = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return float(np.mean(partition - logits[np.arange(len(ids) - 1), ids[1:]]))


def test_text_needs_the_routed_experts(nano: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Legible text: far below the log of the vocabulary (7.6); and clearly worse without the experts' contribution."""
    ids = nano.tokenizer.encode(TEXT)[:200]
    whole = _text_loss(nano, ids)
    assert whole < 4.2
    with monkeypatch.context() as patch:
        patch.setattr("streamer.model.feed_forward.combine", lambda _outputs, _shares, out: out.fill(1e-3))
        assert _text_loss(nano, ids) > whole + 0.1


def test_trainer_s_forward_agrees(nano: LLM) -> None:
    """A second oracle, written by the trainer in torch with its own reader and unpacking."""
    torch = pytest.importorskip("torch")
    from bench.nano.oracle import load_exported, logits

    ids = nano.tokenizer.encode(TEXT)[:200]
    rows: list[np.ndarray] = []
    for _ in nano.stream(ids, SamplingParams(temperature=0.0, max_tokens=1), on_logits=lambda _, x: rows.append(x)):
        pass
    expected = logits(load_exported(BUNDLED, torch.float64), ids).numpy()
    assert np.abs(np.concatenate(rows)[:200] - expected).max() < 1e-3


def test_same_answer_with_four_slots(nano: LLM) -> None:
    with LLM(options=EngineOptions(slots=4, prefill_chunk=7)) as small:
        answer = _ask(small, "What is 48 + 37?")
        assert small.engine.model.experts.counters.decode_misses > 0
    assert answer.token_ids == _ask(nano, "What is 48 + 37?").token_ids


def test_is_small_and_laid_out_as_released() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 20 * 10**6
    index = json.loads((BUNDLED / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{n:05d}-of-{len(shards):06d}.safetensors" for n in range(1, len(shards) + 1)]
    text = json.loads((BUNDLED / "config.json").read_text())["text_config"]
    assert text["hidden_size"] >= 192
    assert text["num_hidden_layers"] >= 9
    assert text["num_experts"] >= 32
    assert text["num_experts_per_token"] == 4
    assert text["routed_expert_hidden_size"] < text["hidden_size"]
    assert text["vocab_size"] >= 1024
    assert text["linear_attn_config"]["full_attn_layers"] == [4, 8, 9]
