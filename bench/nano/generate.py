"""Generation by recomputing whole rows: slow, stateless, and therefore beyond suspicion.

Uses reference arithmetic except that KDA runs by chunks (equal to float32 noise, and faster here).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from . import kda, oracle, tokenizer
from . import reference_ops as ref
from .architecture import END_OF_MSG, PAD
from .dialogue import Renderer
from .model import Model

CHUNKED = SimpleNamespace(**{name: getattr(ref, name) for name in dir(ref) if not name.startswith("__")})
CHUNKED.kda_mix = lambda *args: kda.chunked(*ref.kda_inputs(*args))


def padded(rows: list[list[int]]) -> Tensor:
    """Return rows as one tensor, padded on the right (harmless: causal) to a multiple of the chunk."""
    length = -(-max(map(len, rows)) // kda.CHUNK) * kda.CHUNK
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows])


@torch.no_grad()
def greedy(model: Model, prompts: list[list[int]], limit: int) -> list[list[int]]:
    """Continue each prompt by argmax until the end of the message or `limit` tokens; return the new ids."""
    rows, active = [list(prompt) for prompt in prompts], list(range(len(prompts)))
    for _ in range(limit):
        if not active:
            break
        ids = padded([rows[i] for i in active])
        keep = torch.zeros_like(ids, dtype=torch.bool)
        for place, i in enumerate(active):
            keep[place, len(rows[i]) - 1] = True
        best = model(ids, CHUNKED, keep).argmax(-1).tolist()
        for i, token in zip(active, best, strict=True):
            rows[i].append(token)
        active = [i for i, token in zip(active, best, strict=True) if token != END_OF_MSG]
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


@torch.no_grad()
def sample(model: Model, ids: list[int], tokens: int, temperature: float, seed: int) -> list[int]:
    """Sample up to `tokens` new ids of one row."""
    rng, row = torch.Generator().manual_seed(seed), list(ids)
    for _ in range(tokens):
        x = padded([row])
        keep = torch.zeros_like(x, dtype=torch.bool)
        keep[0, len(row) - 1] = True
        probabilities = (model(x, CHUNKED, keep)[0] / temperature).softmax(-1)
        row.append(int(torch.multinomial(probabilities, 1, generator=rng)))
        if row[-1] == END_OF_MSG:
            break
    return row[len(ids) :]


def main() -> None:
    """Print a continuation of a text, or the answer to a chat message."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="exported directory")
    parser.add_argument("prompt")
    parser.add_argument("--chat", choices=("think", "direct"), help="render the prompt as a user message")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    model, encoding = oracle.load_exported(args.model), tokenizer.load(args.model / "tiktoken.model")
    ids = encoding.encode_ordinary(args.prompt)
    if args.chat:
        ids = Renderer(encoding).prompt(args.prompt, args.chat == "think")
    if args.temperature > 0:
        new = sample(model, ids, args.tokens, args.temperature, args.seed)
    else:
        new = greedy(model, [ids], args.tokens)[0]
    print(encoding.decode(new))


if __name__ == "__main__":
    main()
