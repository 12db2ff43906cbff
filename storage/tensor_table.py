"""Where each tensor of a checkpoint lies, compactly, and how the headers differ from what was expected.

Experts are numpy arrays (6 MB for 494,592 tensors), the trunk a dictionary. Headers are fed in one by one and dropped.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from storage.expert_layout import ExpertLayout, name_pattern
from storage.safetensors_index import Kind, ShardHeader

ABSENT = -1


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One safetensors file: `nbytes` is its size, `digest` the hash of its header."""

    path: Path
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One trunk tensor: `shard` indexes `TensorTable.shards`, `offset` counts from the start of the file."""

    shard: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(slots=True)
class Differences:
    """Names that do not fit: `wrong` are sentences with expected and found."""

    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)


class TensorTable:
    """The expected tensors and, after `add`, their places; `expert_offset` is [layer row, expert, part] or ABSENT."""

    def __init__(self, trunk: Mapping[str, Kind], experts: ExpertLayout) -> None:
        self.expected = trunk
        self.layout = experts
        self.shards: list[ShardFile] = []
        self.trunk: dict[str, TensorEntry] = {}
        self.differences = Differences()
        self.n_tensors = 0
        self.tensor_bytes = 0
        self.row = {layer: row for row, layer in enumerate(experts.layers)}
        shape = (len(experts.layers), experts.n_experts, len(experts.parts))
        self.expert_offset = np.full(shape, ABSENT, np.int64)
        self.expert_shard = np.full(shape, ABSENT, np.int32)
        self._match = name_pattern(experts).fullmatch
        self._part = {name: number for number, (name, _) in enumerate(experts.parts)}
        self._part_kinds: list[Kind] = [("U8", shape) for _, shape in experts.parts]

    def add(self, header: ShardHeader) -> None:
        """Record the tensors of one shard and how they differ from what is expected."""
        shard = len(self.shards)
        self.shards.append(ShardFile(header.path, header.file_bytes, header.digest))
        self.n_tensors += len(header.names)
        self.tensor_bytes += int((header.end - header.begin).sum())
        offsets = (header.begin + header.data_start).tolist()
        for name, kind, offset, nbytes in zip(
            header.names, header.kinds, offsets, (header.end - header.begin).tolist(), strict=True
        ):
            match = self._match(name)
            if match is not None:
                self._add_expert(match[1], match[2], match[3], kind, name, shard, offset)
            else:
                self._add_trunk(name, TensorEntry(shard, *kind, offset, nbytes))

    def _add_expert(self, layer: str, expert: str, part: str, kind: Kind, name: str, shard: int, offset: int) -> None:
        row, number, column = self.row.get(int(layer)), int(expert), self._part[part]
        if row is None or number >= self.layout.n_experts:
            self.differences.unexpected.append(name)
            return
        if kind != self._part_kinds[column]:
            self._wrong(name, self._part_kinds[column], kind, shard)
        if self.expert_shard[row, number, column] != ABSENT:
            self.differences.twice.append(name)
        self.expert_offset[row, number, column] = offset
        self.expert_shard[row, number, column] = shard

    def _add_trunk(self, name: str, entry: TensorEntry) -> None:
        expected = self.expected.get(name)
        if expected is None:
            self.differences.unexpected.append(name)
            return
        if (entry.dtype, entry.shape) != tuple(expected):
            self._wrong(name, expected, (entry.dtype, entry.shape), entry.shard)
        if name in self.trunk:
            self.differences.twice.append(name)
        self.trunk[name] = entry

    def _wrong(self, name: str, expected: Kind, found: Kind, shard: int) -> None:
        what = f"{found[0]} {list(found[1])}, expected {expected[0]} {list(expected[1])}"
        self.differences.wrong.append(f"{name} in {self.shards[shard].path.name} is {what}")

    def missing(self) -> Iterator[str]:
        """Yield the names of expected tensors that no header held."""
        yield from (name for name in self.expected if name not in self.trunk)
        for row, expert, part in zip(*np.nonzero(self.expert_shard == ABSENT), strict=True):
            name, _ = self.layout.parts[part]
            yield self.layout.template.format(layer=self.layout.layers[row], expert=expert, part=name)

    def split_experts(self) -> list[tuple[int, int]]:
        """Return (layer, expert) whose six tensors lie in more than one file."""
        first, last = self.expert_shard.min(axis=2), self.expert_shard.max(axis=2)
        rows, experts = np.nonzero((first != last) & (first != ABSENT))
        return [(self.layout.layers[row], int(expert)) for row, expert in zip(rows, experts, strict=True)]

    def found_parts(self) -> list[int]:
        """Return how many experts' tensors were found, for each of the parts."""
        return [int(count) for count in (self.expert_shard != ABSENT).sum(axis=(0, 1))]

    @property
    def n_complete_experts(self) -> int:
        """Experts of which all six tensors were found."""
        return int((self.expert_shard != ABSENT).all(axis=2).sum())
