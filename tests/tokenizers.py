"""A small real BPE tokenizer on disk, in the checkpoint's own file format (k3-spec §6), for tests that need text.

Ranks 0..255 are the single bytes in byte order, so that an expected id list can be written by hand: `ord("a")` is the
id of "a". Then come the curated merges: "think" and "tools" are one token, "response" is four ("re", "sp", "on", "se")
and "message" is two ("mess", "age"). What is left is filled with pairs of capital letters and digits, which no
curated word contains.
"""

import base64
import itertools
import json
import string
from collections.abc import Mapping
from pathlib import Path

N_RESERVED = 256
"""Reserved ids behind the BPE ranks; the vocabulary of a model is n_ranks + 256."""

RESERVED_OFFSETS: dict[str, int] = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
"""Offset of each named reserved id behind the last rank, as the released checkpoint has them."""

_NOT_SPECIAL = {"<|open|>", "<|close|>", "<|sep|>"}  # flagged special=false in the released file

_CURATED: tuple[bytes, ...] = tuple(
    word.encode()
    for line in (
        ("th", "in", "ink", "think"),
        ("re", "sp", "on", "se"),
        ("me", "ss", "mess", "ge", "age"),
        ("to", "ol", "tool", "tools"),
        ("he", "the", " the", "ll", "hell", "hello", " hello"),
        ("or", "wor", "ld", "world", " world"),
        ("ro", "ser", "user", " a", "an", "and", "  ", "\n\n", "aa", "aaaa"),
        ("中", "文", "中文", "é", "<|", "|>"),
    )
    for word in line
)


def bpe_tokens(n_ranks: int) -> list[bytes]:
    """Return the tokens in rank order: 256 bytes, the curated merges, then filler pairs.

    Raises ValueError when n_ranks is outside what the scheme can fill.
    """
    tokens = [bytes([value]) for value in range(256)]
    alphabet = string.ascii_uppercase + string.digits
    fillers = ("".join(letters).encode() for n in (2, 3) for letters in itertools.product(alphabet, repeat=n))
    tokens.extend(itertools.islice(itertools.chain(_CURATED, fillers), n_ranks - 256))
    if n_ranks < 256 or len(tokens) != n_ranks:
        raise ValueError(f"n_ranks {n_ranks} is outside 256..48,000")
    return tokens


def write_tokenizer(
    directory: Path, vocab_size: int = 768, *, offsets: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Write tiktoken.model and tokenizer_config.json with `vocab_size - 256` ranks into `directory`.

    `offsets` replaces RESERVED_OFFSETS (markers are to be found by name, never by number). Returns name → id of the
    named reserved ids.
    """
    directory.mkdir(parents=True, exist_ok=True)
    n_ranks = vocab_size - N_RESERVED
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(bpe_tokens(n_ranks))]
    (directory / "tiktoken.model").write_text("".join(lines), encoding="ascii")
    named = {name: n_ranks + offset for name, offset in (RESERVED_OFFSETS if offsets is None else offsets).items()}
    added = {
        str(token_id): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": name not in _NOT_SPECIAL,
        }
        for name, token_id in named.items()
    }
    config = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "model_max_length": 1_048_576,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return named
