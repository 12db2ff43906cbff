"""Sampling against hand computations: which tokens stay, how often each is drawn, what a draw depends on."""

import math

import numpy as np
import pytest

from streamer.config.errors import UsageError
from streamer.engine.sampling import SamplingParams, sample, token_logprobs

# probabilities 0.5, 0.25, 0.125, 0.125 at ids 2, 0, 3, 1
LOGITS = np.log(np.array([0.25, 0.125, 0.5, 0.125])).astype(np.float32) + 3


def _counts(params: SamplingParams, draws: int = 4000, banned: np.ndarray | None = None) -> list[float]:
    ids = [sample(LOGITS, params, position, banned) for position in range(draws)]
    return (np.bincount(ids, minlength=4) / draws).tolist()


def _near(expected: list[float]) -> object:
    return pytest.approx(expected, abs=0.03)  # 4 standard deviations of 4,000 draws at p = 0.5


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(top_p=1.0, seed=1), [0.25, 0.125, 0.5, 0.125]),
        (SamplingParams(top_p=1.0, top_k=2, seed=1), [1 / 3, 0, 2 / 3, 0]),
        (SamplingParams(top_p=0.6, seed=1), [1 / 3, 0, 2 / 3, 0]),  # 0.5 < 0.6 <= 0.75: two tokens reach it
        (SamplingParams(top_p=0.5, seed=1), [0, 0, 1, 0]),  # the first alone reaches it
        (SamplingParams(top_p=1e-9, seed=1), [0, 0, 1, 0]),  # never fewer than one
        (SamplingParams(top_p=1.0, min_p=0.4, seed=1), [1 / 3, 0, 2 / 3, 0]),  # 0.25 is over 0.4 · 0.5, 0.125 is not
        (SamplingParams(top_p=1.0, top_k=3, min_p=0.3, seed=1), [1 / 3, 0, 2 / 3, 0]),
        # temperature 0.5 squares the probabilities: 1/16, 1/64, 1/4, 1/64 over 22/64
        (SamplingParams(top_p=1.0, temperature=0.5, seed=1), [4 / 22, 1 / 22, 16 / 22, 1 / 22]),
        (SamplingParams(temperature=0.0), [0, 0, 1, 0]),
        # ties of equal weight go by id: with three tokens kept, id 1 comes before id 3
        (SamplingParams(top_p=1.0, top_k=3, seed=1), [2 / 7, 1 / 7, 4 / 7, 0]),
    ],
)
def test_distribution(params: SamplingParams, expected: list[float]) -> None:
    assert _counts(params) == _near(expected)


def test_banned_ids_are_never_drawn() -> None:
    banned = np.array([2, 3])
    assert _counts(SamplingParams(top_p=1.0, seed=1), banned=banned) == _near([2 / 3, 1 / 3, 0, 0])
    assert sample(LOGITS, SamplingParams(temperature=0.0), 0, banned) == 0


def test_greedy_tie_goes_to_the_lower_id() -> None:
    assert sample(np.array([1, 5, 5, 2], np.float32), SamplingParams(temperature=0.0), 0) == 1


def test_draw_depends_on_seed_and_position_alone() -> None:
    flat = np.zeros(1000, np.float32)
    params = SamplingParams(top_p=1.0, seed=7)
    first = [sample(flat, params, position) for position in range(50)]
    assert [sample(flat, params, position) for position in reversed(range(50))] == first[::-1]
    assert [sample(flat, SamplingParams(top_p=1.0, seed=8), position) for position in range(50)] != first
    assert len(set(first)) > 40  # neighbours in position are independent


def test_seed_is_drawn_when_absent_and_kept_when_given() -> None:
    drawn = SamplingParams().with_seed()
    assert drawn.seed is not None
    assert SamplingParams(seed=0).with_seed().seed == 0


def test_logprobs_are_of_the_untempered_logits() -> None:
    entry = token_logprobs(LOGITS, 0, 3)
    assert entry.logprob == pytest.approx(math.log(0.25))
    assert [token for token, _ in entry.top] == [2, 0, 1]
    assert [value for _, value in entry.top] == pytest.approx([math.log(p) for p in (0.5, 0.25, 0.125)])


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -1.0},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**64},
        {"max_tokens": 0},
        {"logprobs": -1},
        {"stop": ("",)},
        {"stop": "abc"},
        {"temperature": "x"},
        {"max_tokens": 1.5},
        {"seed": 1.5},
        {"top_k": True},
    ],
    ids=str,
)
def test_bad_parameters_are_named(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        SamplingParams(**bad)  # type: ignore[arg-type]
