"""k3-nano's tokenizer: a byte-level BPE trained on its corpus, in K3's file format and regex.

Digits are never merged, so a number is a sequence of digit tokens. Special tokens are never produced by
`encode`: the chat renderer places them by id.
"""

from __future__ import annotations

import base64
import itertools
from collections import Counter, defaultdict
from pathlib import Path

import regex
import tiktoken

from .architecture import BASE_VOCAB, RESERVED, RESERVED_NAMES

UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}&&[^\p{{Han}}]]*[{LOWER}&&[^\p{{Han}}]]+{SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}&&[^\p{{Han}}]]+[{LOWER}&&[^\p{{Han}}]]*{SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def train(texts: list[tuple[str, int]], size: int = BASE_VOCAB) -> list[bytes]:
    """Learn `size` byte strings in rank order from (text, repetitions) pairs."""
    counts: Counter[bytes] = Counter()
    splitter = regex.compile(PATTERN, regex.V1)
    for text, weight in texts:
        for piece in splitter.findall(text):
            if not any(c.isdigit() for c in piece):
                counts[piece.encode()] += weight
    words = [[bytes([b]) for b in piece] for piece in counts]
    weights = list(counts.values())
    vocab = [bytes([b]) for b in range(256)]
    pairs, where = _pair_counts(words, weights)
    while len(vocab) < size:
        # Ties break on the bytes, so the result does not depend on dictionary order.
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        vocab.append(best[0] + best[1])
        for index in where.pop(best):
            _merge(words[index], weights[index], best, pairs, where, index)
        pairs.pop(best, None)
    return vocab


def _pair_counts(words: list[list[bytes]], weights: list[int]) -> tuple[Counter, dict[tuple, set[int]]]:
    pairs: Counter[tuple[bytes, bytes]] = Counter()
    where: dict[tuple[bytes, bytes], set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in itertools.pairwise(word):
            pairs[pair] += weights[index]
            where[pair].add(index)
    return pairs, where


def _merge(
    word: list[bytes],
    weight: int,
    best: tuple[bytes, bytes],
    pairs: Counter,
    where: dict[tuple, set[int]],
    index: int,
) -> None:
    for pair in itertools.pairwise(word):
        pairs[pair] -= weight
    i = 0
    while i < len(word) - 1:
        if (word[i], word[i + 1]) == best:
            word[i : i + 2] = [best[0] + best[1]]
        i += 1
    for pair in itertools.pairwise(word):
        pairs[pair] += weight
        where[pair].add(index)


def save(vocab: list[bytes], path: Path) -> None:
    """Write `tiktoken.model`: one `base64 rank` line per token."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(vocab))
    path.write_text("".join(lines))


def load(path: Path) -> tiktoken.Encoding:
    """Open a `tiktoken.model` of BASE_VOCAB tokens with K3's regex and the reserved names."""
    ranks = {}
    for line in path.read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    special = {reserved_name(offset): len(ranks) + offset for offset in range(RESERVED)}
    return tiktoken.Encoding("k3-nano", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def reserved_name(offset: int) -> str:
    """Return the string of the reserved token at `offset` from the BPE vocabulary's size."""
    return RESERVED_NAMES.get(offset, f"<|reserved_token_{BASE_VOCAB + offset}|>")
