"""Text to token ids and back, exactly as the checkpoint's own tokenizer does it (k3-spec §6).

Text is always encoded in ordinary mode: whatever it contains, it never yields a reserved id. Reserved ids come from
`marker(name)` alone, and names come from tokenizer_config.json, so no id is written down in this package.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tiktoken

from streamer.config.errors import TokenizerError, UsageError
from streamer.text import pretokenize
from streamer.text.tokenizer_files import (
    CONFIG_FILE,
    N_RESERVED,
    RANKS_FILE,
    ReservedToken,
    find_file,
    read_ranks,
    read_reserved,
)

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MSG = "<|end_of_msg|>"
EOS = "[EOS]"

_GENERATED = (OPEN, CLOSE, SEP, END_OF_MSG, EOS)  # the only reserved ids that an answer may contain


class Tokenizer:
    """Byte-level BPE with 256 reserved ids behind the ranks (k3-spec §6).

    `open`, `close`, `sep`, `end_of_msg` and `eos` are ids. `banned_ids` are the reserved ids that must never be
    sampled: padding, unknown, begin of text, media, and every unnamed one.
    """

    def __init__(self, ranks: dict[bytes, int], reserved: Mapping[int, ReservedToken]) -> None:
        """Build from tables that `tokenizer_files` has checked; `from_directories` is the usual way in.

        Raises TokenizerError when a marker of the chat format has no id.
        """
        self.n_ranks = len(ranks)
        self.vocab_size = self.n_ranks + N_RESERVED
        names = {token_id: f"<|reserved_token_{token_id}|>" for token_id in range(self.n_ranks, self.vocab_size)}
        names.update((token_id, token.name) for token_id, token in reserved.items())
        self._ids = {name: token_id for token_id, name in names.items()}
        absent = [name for name in _GENERATED if name not in self._ids]
        if absent:
            raise TokenizerError(
                f"added_tokens_decoder: expected the chat markers {', '.join(_GENERATED)}, found no"
                f" {', '.join(absent)}. Use the {CONFIG_FILE} of the K3 checkpoint; K2's has other names."
            )
        self.open, self.close, self.sep, self.end_of_msg, self.eos = (self._ids[name] for name in _GENERATED)
        generated = {self._ids[name] for name in _GENERATED}
        self.banned_ids = tuple(token_id for token_id in names if token_id not in generated)
        # As the reference decodes: the markers that the file flags special=false are structure and are kept.
        self._skippable = {token_id for token_id in names if token_id not in reserved or reserved[token_id].special}
        self._bytes = [b""] * self.vocab_size
        for token, rank in ranks.items():
            self._bytes[rank] = token
        for token_id, name in names.items():
            self._bytes[token_id] = name.encode("utf-8")
        # No special token is registered: the encoder itself then has no way to produce a reserved id.
        self._bpe = tiktoken.Encoding("k3", pat_str=pretokenize.PATTERN, mergeable_ranks=ranks, special_tokens={})

    @classmethod
    def from_directories(cls, directories: Sequence[Path], vocab_size: int) -> "Tokenizer":
        """Load tiktoken.model and tokenizer_config.json, each from the first directory that has it.

        Raises TokenizerError naming file and line for anything missing, damaged, or not of a `vocab_size` model.
        """
        ranks_path = find_file(directories, RANKS_FILE)
        config_path = find_file(directories, CONFIG_FILE)
        ranks = read_ranks(ranks_path)
        if len(ranks) + N_RESERVED != vocab_size:
            raise TokenizerError(
                f"{ranks_path}: expected {vocab_size - N_RESERVED} ranks (vocab_size {vocab_size} of config.json less"
                f" {N_RESERVED} reserved ids), found {len(ranks)}. The file is cut short or of another model; download"
                " it again."
            )
        reserved = read_reserved(config_path, len(ranks))
        try:
            return cls(ranks, reserved)
        except TokenizerError as error:
            raise TokenizerError(f"{config_path}: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Encode `text` in ordinary mode: no reserved id can result, whatever the text.

        Raises UsageError for a lone surrogate, which no UTF-8 text contains; replacing it would silently change what
        the model reads.
        """
        ids: list[int] = []
        for part in pretokenize.slices(text):
            try:
                part.encode("utf-8")
            except UnicodeEncodeError as error:
                raise _surrogate(text, part[error.start]) from None
            ids += self._bpe.encode_ordinary(part)
        return ids

    def marker(self, name: str) -> int:
        """Return the id of the reserved token `name`. Raises TokenizerError when the checkpoint names none so."""
        try:
            return self._ids[name]
        except KeyError:
            raise TokenizerError(
                f"expected a reserved token {name!r} in {CONFIG_FILE}, found none. Use the file of the K3 checkpoint."
            ) from None

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Decode `ids`; invalid UTF-8 becomes U+FFFD.

        `skip_special` drops the reserved ids except those the file flags special=false (open, close, sep), as the
        reference does. Raises UsageError for an id outside the vocabulary.
        """
        kept = (token_id for token_id in ids if not (skip_special and token_id in self._skippable))
        return b"".join(self.token_bytes(token_id) for token_id in kept).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; a reserved id gives its name. Raises UsageError for an unknown id."""
        if not 0 <= token_id < self.vocab_size:
            raise UsageError(f"token id {token_id}: expected 0..{self.vocab_size - 1}, the vocabulary of this model.")
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is one of the 256 reserved ids."""
        return self.n_ranks <= token_id < self.vocab_size


def _surrogate(text: str, character: str) -> UsageError:
    return UsageError(
        f"text, character {text.index(character)}: expected Unicode text, found the lone surrogate"
        f" U+{ord(character):04X}. The input was not valid UTF-8, or an emoji was cut in half; fix or remove it."
    )


class IncrementalDecoder:
    """Decode a stream of ids to text that is final: a character split over tokens waits for its last byte.

    All pushed text plus `flush()` equals `bytes.decode("utf-8", "replace")` of all the bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with nothing pending."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes; may be empty. Raises UsageError for an unknown id."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return what an incomplete character at the end decodes to, and start afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
