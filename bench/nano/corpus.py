"""The text corpus: Jane Austen's six novels out of Debian's r-cran-janeaustenr package, without R.

The package is an R lazy-load database: zlib chunks, each a serialised character vector of lines.
"""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import tiktoken

RDB = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
HELD_OUT_TOKENS = 30_000
HELD_OUT_AT = 0.7  # fraction of the corpus where the held-out window starts
CHARSXP = 9
STRSXP = 16
LATIN1 = 1 << 14


def read_lines(rdb: Path) -> list[list[str]]:
    """Return the character vectors of an .rdb file, one list of lines per stored object."""
    data, vectors, at = rdb.read_bytes(), [], 0
    while at < len(data):
        # A chunk is a big-endian length of its uncompressed form, then a zlib stream.
        stream = zlib.decompressobj()
        raw = stream.decompress(data[at + 4 :])
        vectors.append(_strings(raw))
        at = len(data) - len(stream.unused_data)
    return [lines for lines in vectors if lines]


def _strings(raw: bytes) -> list[str]:
    """Parse a character vector in R's XDR serialisation, format version 3."""
    (name_bytes,) = struct.unpack_from(">I", raw, 14)  # after the magic, three versions: native encoding
    kind, count = struct.unpack_from(">II", raw, 18 + name_bytes)
    if kind & 0xFF != STRSXP:
        return []
    at, lines = 26 + name_bytes, []
    for _ in range(count):
        flags, length_bytes = struct.unpack_from(">Ii", raw, at)
        if flags & 0xFF != CHARSXP:
            raise ValueError(f"byte {at}: expected a string (type {CHARSXP}), found type {flags & 0xFF}")
        at += 8
        lines.append(raw[at : at + max(length_bytes, 0)].decode("latin-1" if flags & LATIN1 else "utf-8"))
        at += max(length_bytes, 0)
    return lines


def clean(lines: list[str]) -> str:
    """Join hard-wrapped lines into paragraphs separated by one empty line; drop italics marks."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(line.rstrip() for line in lines).replace("_", ""))
    joined = (" ".join(p.split()) for p in paragraphs)
    return "\n\n".join(p for p in joined if p) + "\n\n"


def load(root: Path) -> str:
    """Return the six novels as one text, from an unpacked Debian package (`dpkg-deb -x`) at `root`."""
    return "".join(clean(lines) for lines in read_lines(root / RDB))


def split(text: str, encoding: tiktoken.Encoding) -> tuple[np.ndarray, np.ndarray]:
    """Encode the corpus; return (training ids, held-out ids), the latter one contiguous window."""
    ids = np.array(encoding.encode_ordinary(text), dtype=np.int64)
    start = int(len(ids) * HELD_OUT_AT)
    held_out = ids[start : start + HELD_OUT_TOKENS]
    return np.concatenate((ids[:start], ids[start + HELD_OUT_TOKENS :])), held_out
