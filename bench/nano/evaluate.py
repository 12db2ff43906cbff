"""Measure an exported k3-nano: `python -m bench.nano.evaluate MODEL --corpus DIR`.

Float32 forward of the exported weights. Held-out text loss, held-out sums in both modes, taught answers,
damage by ablation, router balance. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from . import corpus, dialogue, facts, oracle, talk, tokenizer
from .dialogue import Renderer, Turn
from .generate import CHUNKED, greedy, padded
from .model import LatentMoE, Model

ROW, ROWS, BATCH = 256, 48, 16
SUMS = 100
LIMIT = 96  # tokens; a whole worked sum takes under 60


@torch.no_grad()
def text_loss(model: Model, held_out: Tensor, rows: int = ROWS) -> float:
    """Return nats per token over `rows` rows of ROW held-out tokens, each from an empty state."""
    ids = held_out[: rows * ROW + 1]
    x, y = ids[:-1].view(rows, ROW), ids[1:].view(rows, ROW)
    total = 0.0
    for at in range(0, rows, BATCH):
        logits = model(x[at : at + BATCH], CHUNKED).flatten(0, 1)
        total += float(functional.cross_entropy(logits, y[at : at + BATCH].flatten(), reduction="sum"))
    return total / (rows * ROW)


@torch.no_grad()
def exact(model: Model, asked: list[tuple[list[int], list[int]]]) -> list[bool]:
    """Tell for each (prompt, completion) whether argmax reproduces the completion, i.e. greedy emits it."""
    results = []
    for at in range(0, len(asked), 2 * BATCH):
        part = asked[at : at + 2 * BATCH]
        ids = padded([prompt + answer for prompt, answer in part])
        keep = torch.zeros_like(ids, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(part):
            keep[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
        best = model(ids, CHUNKED, keep).argmax(-1).split([len(answer) for _, answer in part])
        results += [got.tolist() == answer for got, (_, answer) in zip(best, part, strict=True)]
    return results


def sum_questions(count: int) -> list[tuple[int, int, str]]:
    """Return `count` held-out sums, spread over the wordings by a fixed seed."""
    rng = random.Random(2026)
    pairs = rng.sample(dialogue.held_out_pairs(), count)
    return [(a, b, rng.choice(dialogue.SUM_PROMPTS)) for a, b in pairs]


def answered(model: Model, renderer: Renderer, turns: list[Turn], thinking: bool) -> float:
    """Return the fraction of turns whose greedy response channel is right and stops by itself.

    Rows that do not reproduce the taught working are generated in full: another working may still be right.
    """
    asked = [(renderer.prompt(t.user, thinking), renderer.completion(t, thinking)) for t in turns]
    right = exact(model, asked)
    open_rows = [i for i, ok in enumerate(right) if not ok]
    generated = greedy(model, [asked[i][0] for i in open_rows], LIMIT) if open_rows else []
    for i, ids in zip(open_rows, generated, strict=True):
        tail = renderer.completion(Turn("", "", turns[i].response), False)
        right[i] = ids[-len(tail) :] == tail
    return sum(right) / len(right)


def history(renderer: Renderer, turns: int, thinking: bool, count: int) -> list[tuple[list[int], list[int]]]:
    """Return conversations whose last of `turns` exchanges is a held-out sum."""
    rng, asked = random.Random(7), []
    for a, b, prompt in sum_questions(count):
        ids = renderer.effort("low") if thinking else []
        for _ in range(turns - 1):
            drawn = dialogue.turn(rng, ["a word"])
            ids += renderer.message(drawn.user, role="user") + renderer.prefix(thinking)
            ids += renderer.completion(drawn, thinking)
        last = dialogue.sum_turn(a, b, prompt)
        ids += renderer.message(last.user, role="user") + renderer.prefix(thinking)
        asked.append((ids, renderer.completion(last, thinking)))
    return asked


def moe_layers(model: Model) -> list[LatentMoE]:
    """Return the MoE blocks in layer order."""
    return [m for m in model.modules() if isinstance(m, LatentMoE)]


@contextmanager
def damaged(model: Model, change: Callable[[LatentMoE], None]) -> Iterator[None]:
    """Apply `change` to every MoE block, and undo it."""
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    blocks = moe_layers(model)
    architectures = [moe.a for moe in blocks]
    for moe in blocks:
        change(moe)
    try:
        yield
    finally:
        model.load_state_dict(saved)
        for moe, a in zip(blocks, architectures, strict=True):
            moe.a = a


def _top_two(moe: LatentMoE) -> None:
    moe.a = type(moe.a)(**{f: getattr(moe.a, f) for f in moe.a.__dataclass_fields__} | {"top_k": 2})


def _each(change: Callable[[Tensor], Tensor]) -> Callable[[LatentMoE], None]:
    def apply(moe: LatentMoE) -> None:
        for w in moe.experts.parameters():
            w.copy_(change(w))

    return apply


ABLATIONS: dict[str, Callable[[LatentMoE], None]] = {
    "routed experts off": lambda moe: moe.experts.w2.zero_(),
    "experts permuted": _each(lambda w: w.roll(1, 0)),
    "nibbles swapped": _each(lambda w: w.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)),
    "top-2 instead of top-4": _top_two,
    "selection bias zero": lambda moe: moe.gate.e_score_correction_bias.zero_(),
    "shared experts off": lambda moe: moe.shared_experts.down_proj.weight.zero_(),
}


@torch.no_grad()
def load_cv(model: Model, ids: Tensor) -> float:
    """Return the mean over layers of std/mean of tokens per expert on ids [B, T]."""
    model.train()  # the router counts its load in training mode; nothing else differs (no drop is set)
    model(ids, CHUNKED)
    model.eval()
    loads = [moe.gate.load.double() for moe in moe_layers(model)]
    return sum(float(load.std(unbiased=False) / load.mean()) for load in loads) / len(loads)


def chat_scores(model: Model, renderer: Renderer) -> dict[str, float]:
    """Return the fractions of right answers on sums, taught answers and deep histories."""
    sums = [dialogue.sum_turn(a, b, prompt) for a, b, prompt in sum_questions(SUMS)]
    taught = [
        (name, [Turn(asks[0], think, answer) for asks, think, answer in entries])
        for name, entries in (("facts", facts.FACTS), ("self", talk.SELF), ("talk", talk.TALK))
    ]
    names = [Turn(f"My name is {name}.", f"A name: {name}.", f"Nice to meet you, {name}!") for name in talk.NAMES]
    taught.append(("repeats a name", names))
    scores = {}
    for mode, thinking in (("think", True), ("direct", False)):
        for name, turns in [("held-out sums", sums), *taught]:
            scores[f"{name}, {mode}"] = answered(model, renderer, turns, thinking)
        deep = history(renderer, 6, thinking, 30)
        scores[f"held-out sum as 6th turn, {mode}"] = sum(exact(model, deep)) / len(deep)
    return scores


def every_pair(model: Model, renderer: Renderer) -> dict[str, float]:
    """Return exact-transcript rates on all held-out ordered pairs in one wording."""
    turns = [dialogue.sum_turn(a, b, "What is {a} + {b}?") for a, b in dialogue.held_out_pairs()]
    scores = {}
    for mode, thinking in (("think", True), ("direct", False)):
        asked = [(renderer.prompt(t.user, thinking), renderer.completion(t, thinking)) for t in turns]
        scores[f"all {len(turns)} held-out pairs, {mode}"] = sum(exact(model, asked)) / len(asked)
    return scores


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="exported directory")
    parser.add_argument("--corpus", type=Path, required=True, help="unpacked r-cran-janeaustenr package")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--full", action="store_true", help="also every held-out pair, and the ablations")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, encoding = oracle.load_exported(args.model), tokenizer.load(args.model / "tiktoken.model")
    renderer = Renderer(encoding)
    held_out = torch.from_numpy(corpus.split(corpus.load(args.corpus), encoding)[1])
    base = text_loss(model, held_out)
    tokens = ROWS * ROW
    text_bytes = len(encoding.decode_bytes(held_out[1 : tokens + 1].tolist()))
    scores = {"text nats/token": base, "text bits/byte": base / math.log(2) * tokens / text_bytes}
    scores["router load CV on text"] = load_cv(model, held_out[: 16 * ROW].view(16, ROW))
    scores |= chat_scores(model, renderer)
    if args.full:
        scores |= every_pair(model, renderer)
        scores["text nats/token, 16 rows"] = text_loss(model, held_out, 16)
        sums = [dialogue.sum_turn(a, b, prompt) for a, b, prompt in sum_questions(SUMS)]
        asked = [(renderer.prompt(t.user, True), renderer.completion(t, True)) for t in sums]
        for name, change in ABLATIONS.items():
            with torch.no_grad(), damaged(model, change):
                scores[f"{name}: text nats/token, 16 rows"] = text_loss(model, held_out, 16)
                scores[f"{name}: sums, think"] = sum(exact(model, asked)) / len(asked)
    for name, value in scores.items():
        print(f"{name:45s} {value:.4f}")
    print(json.dumps({name: round(value, 5) for name, value in scores.items()}))


if __name__ == "__main__":
    main()
