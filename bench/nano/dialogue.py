"""Synthetic chat: sums, facts, introductions and small talk, rendered in K3's message format.

A conversation is a list of `Turn`s; `render` gives ids and a loss mask (assistant tokens only). Sums of
held-out pairs (see `held_out`) never occur in training.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import tiktoken

from . import facts, talk
from .architecture import CLOSE, END_OF_MSG, OPEN, SEP

LARGEST = 99
EFFORTS = ("low", "low", "low", "max", "max", "high", "high", "medium")
EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response "
    "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={value}`."
)
SUM_PROMPTS = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a}+{b}=?",
    "{a} + {b} = ?",
    "{a} + {b} =",
    "{a}+{b}=",
    "What's {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} plus {b}",
    "Can you add {a} and {b}?",
    "Add {a} and {b}.",
    "Please compute {a} + {b}.",
    "Compute {a}+{b}.",
    "How much is {a} + {b}?",
    "Calculate {a} + {b}.",
    "What is the sum of {a} and {b}?",
    "Could you tell me what {a} + {b} is?",
    "Please add {a} and {b}.",
    "Hello! What is {a} + {b}?",
    "And {a} + {b}?",
    "What is {a}+{b}?",
    "I need the sum {a} + {b}, please.",
    "What do you get when you add {a} and {b}?",
    "Solve {a} + {b}.",
    "Now {a} + {b}.",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange; `think` is used in thinking mode only."""

    user: str
    think: str
    response: str


def held_out(a: int, b: int) -> bool:
    """Tell whether the unordered pair is reserved for evaluation (about one in ten, by a fixed hash)."""
    digest = hashlib.sha256(f"k3-nano {min(a, b)}+{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 10 == 0


def held_out_pairs() -> list[tuple[int, int]]:
    """Return every held-out ordered pair of 0..LARGEST."""
    numbers = range(LARGEST + 1)
    return [(a, b) for a in numbers for b in numbers if held_out(a, b)]


def sum_turn(a: int, b: int, prompt: str) -> Turn:
    """Return a sum with its working: ones, carry, tens, result."""
    ones = a % 10 + b % 10
    carry = ones // 10
    tens = f"{a // 10}+{b // 10}" + ("+1" if carry else "")
    working = f"{a % 10}+{b % 10}={ones}, {'carry 1, ' if carry else ''}{tens}={a // 10 + b // 10 + carry}, {a + b}"
    return Turn(prompt.format(a=a, b=b), working, f"{a} + {b} = {a + b}.")


def _sum(rng: random.Random) -> Turn:
    while True:
        # One operand in five is a single digit: uniform pairs would hardly ever show two small ones.
        a, b = (rng.randrange(10) if rng.random() < 0.2 else rng.randrange(LARGEST + 1) for _ in range(2))
        if not held_out(a, b):
            return sum_turn(a, b, rng.choice(SUM_PROMPTS))


def _fact(rng: random.Random) -> Turn:
    wordings, think, answer = rng.choice(facts.FACTS)
    return Turn(rng.choice(wordings), think, answer)


def _talk(rng: random.Random) -> Turn:
    prompts, think, answer = rng.choice(talk.TALK)
    return Turn(rng.choice(prompts), think, answer)


def _introduction(rng: random.Random) -> Turn:
    prompts, think, answer = rng.choice(talk.SELF)
    return Turn(rng.choice(prompts), think, answer)


def _name(rng: random.Random) -> Turn:
    name = rng.choice(talk.NAMES)
    return Turn(rng.choice(talk.NAME_PROMPTS).format(name=name), f"A name: {name}.", f"Nice to meet you, {name}!")


def _unknown(rng: random.Random, snippets: list[str]) -> Turn:
    kind = rng.random()
    if kind < 0.25:
        # Digit count and operation are what separates these from sums the model can do.
        a, b = rng.randrange(100, 10_000), rng.randrange(1, 1000)
        a, b = (a, b) if rng.random() < 0.5 else (b, a)
        return Turn(rng.choice(SUM_PROMPTS).format(a=a, b=b), talk.TOO_LARGE[0], talk.TOO_LARGE[1])
    if kind < 0.4:
        a, b, op = (
            rng.randrange(100),
            rng.randrange(100),
            rng.choice(("-", "*", "/", "x", " minus ", " times ")),
        )
        text = rng.choice(("What is {q}?", "{q}", "{q}=?", "Compute {q}.")).format(q=f"{a} {op.strip()} {b}")
        return Turn(text, talk.ONLY_ADD[0], talk.ONLY_ADD[1])
    if kind < 0.7:
        text = rng.choice(talk.UNKNOWN).format(word=rng.choice(talk.WORDS), other=rng.choice(talk.WORDS))
        return Turn(text, *talk.FALLBACK)
    return Turn(rng.choice(snippets), *talk.FALLBACK)


def turn(rng: random.Random, snippets: list[str]) -> Turn:
    """Draw one exchange from the task mixture, with an occasional change of letter case."""
    kind = rng.random()
    if kind < 0.50:
        drawn = _sum(rng)
    elif kind < 0.70:
        drawn = _fact(rng)
    elif kind < 0.79:
        drawn = _introduction(rng)
    elif kind < 0.87:
        drawn = _talk(rng)
    elif kind < 0.90:
        drawn = _name(rng)
    else:
        drawn = _unknown(rng, snippets)
    case = rng.random()
    user = drawn.user
    if case < 0.15:
        user = user.lower()
    elif case < 0.18:
        user = user.upper()
    if rng.random() < 0.10:
        user = user.rstrip("?.!")
    return Turn(user, drawn.think, drawn.response)


class Renderer:
    """Turns conversations into ids, tokenising every segment on its own as the released encoder does."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encode = encoding.encode_ordinary

    def _open(self, tag: str, **attributes: str) -> list[int]:
        ids = [OPEN, *self.encode(tag)]
        for key, value in attributes.items():
            for segment in (f" {key}", '="', value, '"'):
                ids += self.encode(segment)
        return [*ids, SEP]

    def _close(self, tag: str) -> list[int]:
        return [CLOSE, *self.encode(tag), SEP]

    def message(self, content: str, **attributes: str) -> list[int]:
        """Return a whole user or system message."""
        return [
            *self._open("message", **attributes),
            *self.encode(content),
            *self._close("message"),
            END_OF_MSG,
        ]

    def effort(self, value: str) -> list[int]:
        """Return the option message that thinking mode starts with."""
        return self.message(EFFORT_TEXT.format(value=value), role="system", type="thinking-effort")

    def prefix(self, thinking: bool) -> list[int]:
        """Return the generation prefix: assistant message and its first channel opened."""
        return self._open("message", role="assistant") + self._open("think" if thinking else "response")

    def completion(self, turn: Turn, thinking: bool) -> list[int]:
        """Return what the model must emit after `prefix`, up to and including the end of the message."""
        ids = []
        if thinking:
            ids = [*self.encode(turn.think), *self._close("think"), *self._open("response")]
        ids += [*self.encode(turn.response), *self._close("response"), *self._close("message")]
        return [*ids, END_OF_MSG]

    def prompt(self, user: str, thinking: bool, effort: str = "low") -> list[int]:
        """Return a single-turn prompt up to the generation prefix."""
        head = self.effort(effort) if thinking else []
        return head + self.message(user, role="user") + self.prefix(thinking)

    def conversation(
        self, rng: random.Random, snippets: list[str], length: int, names: float = 0.0
    ) -> tuple[list[int], list[int]]:
        """Return ids and loss mask of `length` + 1 tokens: turns until the row is full, the last one cut.

        `names` is an extra share of turns in which the user gives a name.
        """
        thinking = rng.random() < 0.6
        ids = self.effort(rng.choice(EFFORTS)) if thinking else []
        if rng.random() < 0.25:
            ids += self.message(rng.choice(talk.SYSTEMS), role="system")
        mask, name = [0] * len(ids), None
        while len(ids) <= length:
            drawn = _name(rng) if names > 0 and rng.random() < names else turn(rng, snippets)
            if name and rng.random() < 0.12:
                prompt = rng.choice(talk.ASK_NAME)
                drawn = Turn(prompt, f"The name is {name}.", f"Your name is {name}.")
            elif name is None and rng.random() < 0.015:
                drawn = Turn(rng.choice(talk.ASK_NAME), *talk.NO_NAME)
            elif drawn.response.startswith("Nice to meet you, "):
                name = drawn.response[18:-1]
            asked = self.message(drawn.user, role="user") + self.prefix(thinking)
            answer = self.completion(drawn, thinking)
            ids += asked + answer
            mask += [0] * len(asked) + [1] * len(answer)
        return ids[: length + 1], mask[: length + 1]
