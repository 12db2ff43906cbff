"""Read tiktoken.model and tokenizer_config.json into plain dictionaries, or say exactly what is wrong with them.

Knows the file formats (k3-spec §6) and nothing about encoding. Never touches the network.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamer.config.errors import TokenizerError

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
N_RESERVED = 256
"""Reserved ids that follow the BPE ranks."""


@dataclass(frozen=True, slots=True)
class ReservedToken:
    """One named reserved id. `special` is the file's own flag: false for the three markers that carry structure."""

    name: str
    special: bool


def find_file(directories: Sequence[Path], name: str) -> Path:
    """Return the first `name` in `directories`. Raises TokenizerError when no directory holds it."""
    for directory in directories:
        path = directory / name
        if path.is_dir():
            raise TokenizerError(f"{path}: expected a file, found a directory. Download {name} again.")
        if path.is_file() or path.is_symlink():  # a link that leads nowhere is reported when it is read
            return path
    places = ", ".join(str(directory) for directory in directories) or "no directory at all"
    message = f"{name} not found in {places}."
    if name == RANKS_FILE:
        message += (
            " K3 ships tiktoken.model and no tokenizer.json, and downloaders that filter by file name"
            " (*.json, *.safetensors) leave it out."
        )
    raise TokenizerError(f"{message} Download {name} from the model's repository into one of these directories.")


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read `base64(bytes) SPACE rank` lines into bytes → rank.

    Raises TokenizerError naming the line for bad base64, a bad rank, a duplicate, or a gap, and when one of the 256
    single bytes is absent (some text could then not be encoded).
    """
    ranks: dict[bytes, int] = {}
    seen: dict[int, int] = {}  # rank → line, to name both lines of a duplicate
    data = _read(path)
    if data.startswith(b"version https://git-lfs"):
        raise TokenizerError(f"{path}: expected the ranks, found a Git LFS pointer. Run 'git lfs pull' there.")
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        token, rank = _parse_line(path, number, line)
        if rank in seen:
            raise _damaged(path, number, f"expected each rank once, found rank {rank} again (first on {seen[rank]})")
        if token in ranks:
            raise _damaged(path, number, f"expected each token once, found {token!r} again (rank {ranks[token]})")
        seen[rank] = number
        ranks[token] = rank
    gap = next((rank for rank in range(len(ranks)) if rank not in seen), None)
    if gap is not None:
        raise _damaged(path, None, f"expected ranks 0..{len(ranks) - 1} without a gap, found no rank {gap}")
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise _damaged(path, None, f"expected all 256 single bytes as tokens, found no 0x{missing[0]:02x}")
    return ranks


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        target = f" (a link to {path.readlink()})" if path.is_symlink() else ""
        raise TokenizerError(
            f"{path}{target}: could not be read ({error.strerror}). Check its permissions and the drive."
        ) from error


def _parse_line(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    fields = line.split()
    if len(fields) != 2:
        raise _damaged(path, number, f"expected 'base64 rank', found {_shown(line)}")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error:
        raise _damaged(path, number, f"expected base64, found {_shown(fields[0])}") from None
    if not token:
        raise _damaged(path, number, "expected at least one byte, found an empty token")
    if not fields[1].isdigit():
        raise _damaged(path, number, f"expected a rank, a whole number from 0, found {_shown(fields[1])}")
    return token, int(fields[1][:18])


def _shown(data: bytes) -> str:
    return repr(data[:40].decode("latin-1"))


def _damaged(path: Path, line: int | None, what: str) -> TokenizerError:
    where = str(path) if line is None else f"{path} line {line}"
    return TokenizerError(f"{where}: {what}. The file is damaged or not K3's; download it again.")


def read_reserved(path: Path, n_ranks: int) -> dict[int, ReservedToken]:
    """Read `added_tokens_decoder` into id → name and flag.

    Raises TokenizerError for unreadable JSON, an id outside the 256 behind the ranks, or a name used twice.
    """
    try:
        config = json.loads(_read(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: expected JSON, found {error}. Download the file again.") from error
    added = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if not isinstance(added, dict):
        raise TokenizerError(
            f"{path}: expected an object 'added_tokens_decoder' that names the reserved tokens, found none."
            " Use the tokenizer_config.json of the checkpoint."
        )
    reserved: dict[int, ReservedToken] = {}
    ids: dict[str, int] = {}
    for key, entry in added.items():
        token_id, token = _reserved_entry(path, key, entry, n_ranks)
        if token.name in ids:
            raise TokenizerError(
                f"{path}: expected each added token once, found {token.name!r} as {ids[token.name]} and {token_id}."
                " Use the tokenizer_config.json of the checkpoint."
            )
        ids[token.name] = token_id
        reserved[token_id] = token
    return reserved


def _reserved_entry(path: Path, key: str, entry: object, n_ranks: int) -> tuple[int, ReservedToken]:
    name = entry.get("content") if isinstance(entry, Mapping) else None
    if not isinstance(name, str) or not name or not isinstance(entry, Mapping):
        raise TokenizerError(
            f"{path}: added_tokens_decoder[{key!r}]: expected an object with a string 'content', found {entry!r}."
            " Use the tokenizer_config.json of the checkpoint."
        )
    last = n_ranks + N_RESERVED - 1
    if not (key.isascii() and key.isdigit() and n_ranks <= int(key[:18]) <= last):
        raise TokenizerError(
            f"{path}: added_tokens_decoder[{key!r}] ({name}): expected an id in {n_ranks}..{last}, the 256 ids behind"
            f" the {n_ranks} ranks of {RANKS_FILE}. The files are of different models, or {RANKS_FILE} is cut short."
        )
    return int(key), ReservedToken(name, entry.get("special") is not False)
