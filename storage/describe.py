"""Turns long lists of tensors, layers and shards into short phrases for a person."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

MAX_NAMED = 3  # up to here each name is spelled out
_LAYER = re.compile(r"\.layers\.([0-9]+)\.")
_NUMBERED = re.compile(r"(.*?)([0-9]+)-of-([0-9]+)\.safetensors")


def ranges(numbers: Iterable[int], limit: int = 12) -> str:
    """Return '3, 31-40' for sorted unique numbers; further ranges than `limit` are counted."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more


def tensors(names: Sequence[str]) -> str:
    """Return the names where they are few, else layer ranges, the tensors outside the layers, and the count."""
    if len(names) <= MAX_NAMED:
        return ", ".join(names)
    layers: set[int] = set()
    others = []
    for name in names:
        match = _LAYER.search(name)
        if match:
            layers.add(int(match[1]))
        else:
            others.append(name)
    parts = [f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}"] if layers else []
    parts += [shorten(others)] if others else []
    return f"{', '.join(parts)} ({len(names):,} tensors)"


def shorten(items: Sequence[str], limit: int = MAX_NAMED) -> str:
    """Return the first items and how many more there are."""
    more = f" and {len(items) - limit:,} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def shards(names: Sequence[str]) -> str:
    """Return 'shards 31-40 of 96' for numbered shard files, else the file names."""
    matches = [_NUMBERED.fullmatch(name) for name in names]
    numbered = [match for match in matches if match is not None]
    if len(numbered) != len(names) or not names or len({match[3] for match in numbered}) > 1:
        return shorten(list(names), limit=6)
    numbers = [int(match[2]) for match in numbered]
    return f"shard{'s' if len(names) > 1 else ''} {ranges(numbers)} of {int(numbered[0][3])}"


def absent_from_numbering(names: Iterable[str]) -> list[str]:
    """Return the shard names that the numbering of `names` (00002-of-000096) implies but that are not there."""
    present = set(names)
    absent: set[str] = set()
    for name in present:
        match = _NUMBERED.fullmatch(name)
        if match is None or int(match[3]) > 100_000:
            continue
        width = len(match[2])
        series = (f"{match[1]}{i:0{width}d}-of-{match[3]}.safetensors" for i in range(1, int(match[3]) + 1))
        absent.update(one for one in series if one not in present)
        if absent:
            break  # one series is enough to name the gap
    return sorted(absent)


def places(directories: Sequence[Path]) -> str:
    """Return the directories as a phrase."""
    return " + ".join(str(directory) for directory in directories)
