"""How text is cut before BPE: the released regex, and the slicing of very long inputs (k3-spec §6).

The cuts of `slices` are token boundaries of the reference, so they are part of the exact encoding, and they bound the
time that BPE spends on one piece.
"""

import re
from collections.abc import Iterator

PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Alternatives in order; Rust fancy-regex syntax, where && is set intersection."""

MAX_SLICE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
"""Most consecutive space, or consecutive non-space, characters in one slice."""

_RUN = re.compile(r"\s+|\S+")  # for str, \s is exactly str.isspace, the reference's test


def slices(text: str) -> Iterator[str]:
    """Cut `text` where the reference does; the slices joined are `text`."""
    for start in range(0, len(text), MAX_SLICE_CHARS):
        part = text[start : start + MAX_SLICE_CHARS]
        if len(part) <= MAX_RUN_CHARS:
            yield part
        else:
            yield from _bounded_runs(part)


def _bounded_runs(part: str) -> Iterator[str]:
    begin = 0
    for run in _RUN.finditer(part):
        # The reference counts from the cut: a run is cut every 25,000 characters, its rest stays with what follows.
        for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
            yield part[begin:cut]
            begin = cut
    yield part[begin:]
