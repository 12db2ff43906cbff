"""Training batches as a pure function of (seed, step), so that a resumed run sees the same data."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .dialogue import Renderer

SHORT, LONG = 256, 1024  # row lengths in tokens; each step holds POSITIONS of them
POSITIONS = 3072
LONG_EVERY = 4
CHAT_FROM = 900  # the first steps are mostly text, which teaches the language; then chat takes over
TEXT_ROWS_EARLY, TEXT_ROWS_LATE = 7, 4  # of 12; of a long step's 3 rows 1 or 2 in turn, then always 1
NAMES_FROM, NAMES = 1700, 0.08  # repeating a name is the slowest task to learn: more of it late in the run


@dataclass(slots=True)
class Batches:
    """Draws steps from a token corpus and the chat mixture."""

    corpus: np.ndarray
    snippets: list[str]
    renderer: Renderer
    seed: int

    def step(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs [B, T], targets [B, T] and the boolean supervision mask [B, T] of one step."""
        rng = random.Random(f"{self.seed} {index}")
        if index % LONG_EVERY == LONG_EVERY - 1:
            length, text_rows = LONG, 1 + (index < CHAT_FROM and index // LONG_EVERY % 2)
        else:
            length, text_rows = SHORT, TEXT_ROWS_EARLY if index < CHAT_FROM else TEXT_ROWS_LATE
        rows, masks = [], []
        for row in range(POSITIONS // length):
            if row < text_rows:
                at = rng.randrange(len(self.corpus) - length - 1)
                rows.append(self.corpus[at : at + length + 1].tolist())
                masks.append([1] * (length + 1))
            else:
                ids, mask = self.renderer.conversation(
                    rng, self.snippets, length, NAMES if index >= NAMES_FROM else 0.0
                )
                rows.append(ids)
                masks.append(mask)
        ids = torch.tensor(rows)
        return ids[:, :-1], ids[:, 1:], torch.tensor(masks)[:, 1:].bool()


def snippets(text: str, count: int, seed: int) -> list[str]:
    """Return short spans of the corpus as user messages the model is not expected to understand."""
    rng, words, found = random.Random(f"snippets {seed}"), text.split(), []
    while len(found) < count:
        at = rng.randrange(len(words) - 20)
        found.append(" ".join(words[at : at + rng.randrange(1, 14)]))
    return found
