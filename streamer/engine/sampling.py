"""Sampling: a pure function of (logits row, parameters, seed, position), in float64 (design §8)."""

import secrets
from dataclasses import dataclass, replace

import numpy as np

from streamer.config.errors import UsageError

MAX_LOGPROBS = 100


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Names and meanings are vLLM's.

    temperature 0 is greedy. Filters apply in the order top_k (0 = off), top_p, min_p, on the tempered distribution.
    `stop` strings are cut from the text; `stop_token_ids` end the request in addition to the model's own.
    `logprobs` n reports the n likeliest tokens and the chosen one at every position, from the untempered logits.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        if self.top_p == 0:
            raise UsageError(
                "top_p: expected a number above 0, up to 1, found 0. For the likeliest token, temperature 0."
            )
        _check_integer("top_k", self.top_k, 0)
        for name, least in (("seed", 0), ("max_tokens", 1), ("logprobs", 0)):
            value = getattr(self, name)
            if value is not None:
                _check_integer(name, value, least)
        if self.seed is not None and self.seed >= 2**64:
            raise UsageError(f"seed: expected a number below 2^64, found {self.seed}.")
        if self.logprobs is not None and self.logprobs > MAX_LOGPROBS:
            raise UsageError(f"logprobs: expected 0 to {MAX_LOGPROBS}, found {self.logprobs}.")
        if isinstance(self.stop, str) or any(not isinstance(text, str) or not text for text in self.stop):
            raise UsageError(f"stop: expected a list of strings that are not empty, found {self.stop!r}.")

    def with_seed(self) -> "SamplingParams":
        """These parameters with a seed: the given one, or one drawn now, so that a run can be repeated."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))


def _check_number(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= float(value) <= high:  # type: ignore[arg-type]  # NaN fails the comparison
        raise UsageError(f"{name}: expected a number from {low:g} to {high:g}, found {value!r}.")


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name}: expected a whole number, {least} or more, found {value!r}.")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position: of the chosen token, and of the likeliest ones, descending."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def sample(logits: np.ndarray, params: SamplingParams, position: int, banned: np.ndarray | None = None) -> int:
    """The next token id, from float32 [vocab] logits at absolute `position`.

    Random numbers are counter-based (Philox keyed by seed, counted by position): no state is carried, so a resumed or
    batched request draws what it would have drawn alone. `banned` ids are never chosen.
    """
    scores = logits.astype(np.float64)
    if banned is not None:
        scores[banned] = -np.inf
    if params.temperature == 0.0:
        return int(np.argmax(scores))  # first of equals: the lower id
    order = np.argsort(-scores, kind="stable")
    tempered = (scores[order] - scores[order[0]]) / params.temperature
    weights = np.exp(tempered)
    keep = _filtered(weights, params)
    cumulative = np.cumsum(weights[:keep])
    draw = _uniform(params.seed or 0, position) * cumulative[-1]
    return int(order[min(np.searchsorted(cumulative, draw, side="right"), keep - 1)])


def _filtered(weights: np.ndarray, params: SamplingParams) -> int:
    """How many of the descending `weights` stay after top-k, top-p and min-p; at least one."""
    keep = len(weights) if params.top_k == 0 else min(params.top_k, len(weights))
    if params.top_p < 1.0:
        cumulative = np.cumsum(weights[:keep])
        # the smallest prefix that reaches top_p of the mass
        keep = min(keep, int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1)
    if params.min_p > 0.0:
        keep = min(keep, int(np.count_nonzero(weights[:keep] >= params.min_p * weights[0])))
    return max(keep, 1)


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position only."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=position))
    return float(generator.random())


def token_logprobs(logits: np.ndarray, token_id: int, count: int) -> TokenLogprobs:
    """Log-probabilities of float32 [vocab] logits at one position: the chosen token's and the `count` likeliest."""
    scores = logits.astype(np.float64)
    top = scores.max()
    scores -= top + np.log(np.exp(scores - top).sum())
    order = np.argsort(-scores, kind="stable")[:count]
    return TokenLogprobs(token_id, float(scores[token_id]), tuple((int(i), float(scores[i])) for i in order))
