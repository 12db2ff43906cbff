"""Reads tensors and locates experts of a checked checkpoint. Files are opened when first needed and only ever read."""

import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from storage.blocks import Block
from storage.errors import StorageError
from storage.expert_layout import ExpertLayout, name_pattern, part_bytes
from storage.preflight import PreflightReport, preflight
from storage.safetensors_index import DTYPE_BYTES, Kind
from storage.span import ExpertSpan
from storage.tensor_table import TensorEntry

MAX_READ_BYTES = 1 << 30  # the kernel returns at most 2 GiB - 4096 a call anyway
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F32": np.dtype("<f4"), "U8": np.dtype("u1")}


class Checkpoint:
    """The tensors of one checkpoint, by name. `read` may be called from several threads."""

    def __init__(self, report: PreflightReport) -> None:
        """Wrap the result of a preflight; raises CheckpointError where it found problems."""
        report.check()
        self.directories = report.directories
        self.warnings = tuple(report.warnings)
        self.tensor_bytes = report.table.tensor_bytes
        self.n_tensors = report.table.n_tensors
        self._table = report.table
        self._layout: ExpertLayout = report.table.layout
        self._part_bytes = part_bytes(self._layout)
        self._match: re.Pattern[str] = name_pattern(self._layout)
        self._descriptors: dict[int, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        directories: Sequence[Path],
        trunk: Mapping[str, Kind],
        experts: ExpertLayout,
        optional_prefixes: tuple[str, ...] = (),
    ) -> "Checkpoint":
        """Check every header and return the checkpoint; raises CheckpointError (see `preflight`)."""
        return cls(preflight(directories, trunk, experts, optional_prefixes))

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    @property
    def files(self) -> tuple[Path, ...]:
        """The shards, in order of their names."""
        return tuple(shard.path for shard in self._table.shards)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, all six tensors."""
        return sum(self._part_bytes)

    @property
    def fingerprint(self) -> str:
        """Hex hash of shard names, sizes and headers: independent of the directory, other for another layout."""
        digest = sha256()
        for shard in sorted(self._table.shards, key=lambda shard: shard.path.name):
            digest.update(
                f"{shard.path.name}\0{shard.nbytes}\0{shard.digest.hex()}\n".encode("utf-8", "surrogateescape")
            )
        return digest.hexdigest()[:32]

    def __contains__(self, name: str) -> bool:
        return name in self._table.trunk or self._match.fullmatch(name) is not None

    def read(self, name: str) -> np.ndarray:
        """Return one tensor in a fresh array: BF16 as uint16, F32 as float32, U8 as uint8.

        Raises StorageError for an unknown name, and with file, offset, expected and got where the file is short.
        """
        entry = self._entry(name)
        array = np.empty(entry.shape, NUMPY_DTYPES[entry.dtype])
        self._fill(entry.shard, entry.offset, array.reshape(-1).view(np.uint8), name)
        return array

    def read_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return `rows` (any order, repeats allowed) of a tensor's first axis, reading only their bytes."""
        entry = self._entry(name)
        rows = np.asarray(rows, dtype=np.int64)
        if not entry.shape or rows.ndim != 1 or (len(rows) and not 0 <= rows.min() <= rows.max() < entry.shape[0]):
            raise StorageError(f"{name}: rows must be a list of numbers within its shape {list(entry.shape)}")
        unique, inverse = np.unique(rows, return_inverse=True)
        array = np.empty((len(unique), *entry.shape[1:]), NUMPY_DTYPES[entry.dtype])
        row_bytes = math.prod(entry.shape[1:]) * DTYPE_BYTES[entry.dtype]
        flat = array.reshape(-1).view(np.uint8)
        # Neighbouring rows are one read.
        starts = np.flatnonzero(np.diff(unique, prepend=-2) != 1).tolist()
        for start, stop in pairwise([*starts, len(unique)]):
            target = flat[start * row_bytes : stop * row_bytes]
            self._fill(entry.shard, entry.offset + int(unique[start]) * row_bytes, target, name)
        return array[inverse]

    def block(self, name: str) -> Block:
        """Return where a tensor lies. Raises StorageError for an unknown name."""
        entry = self._entry(name)
        return Block(self._table.shards[entry.shard].path, entry.offset, entry.nbytes)

    def expert_span(self, layer: int, expert: int) -> ExpertSpan:
        """Return where an expert lies: one piece where its tensors are contiguous in canonical order, else six.

        Raises StorageError for a layer without experts or an expert out of range.
        """
        row = self._table.row.get(layer)
        if row is None or not 0 <= expert < self._layout.n_experts:
            layers = f"{self._layout.layers[0]}-{self._layout.layers[-1]}"
            found = f"expert {expert} of layer {layer}"
            raise StorageError(f"{found}: there are experts 0-{self._layout.n_experts - 1} in layers {layers}")
        offsets = self._table.expert_offset[row, expert].tolist()
        pieces = tuple(zip(offsets, self._part_bytes, strict=True))
        path = self._table.shards[int(self._table.expert_shard[row, expert, 0])].path
        if all(one + nbytes == other for (one, nbytes), (other, _) in pairwise(pieces)):
            return ExpertSpan(path, ((offsets[0], self.expert_bytes),))
        return ExpertSpan(path, pieces)

    def _entry(self, name: str) -> TensorEntry:
        entry = self._table.trunk.get(name)
        if entry is not None:
            return entry
        match = self._match.fullmatch(name)
        row = self._table.row.get(int(match[1])) if match else None
        if match is None or row is None or int(match[2]) >= self._layout.n_experts:
            raise StorageError(f"no tensor {name!r} in {', '.join(map(str, self.directories))}")
        part = [part_name for part_name, _ in self._layout.parts].index(match[3])
        place = row, int(match[2]), part
        shard, offset = int(self._table.expert_shard[place]), int(self._table.expert_offset[place])
        return TensorEntry(shard, "U8", self._layout.parts[part][1], offset, self._part_bytes[part])

    def _descriptor(self, shard: int) -> int:
        with self._lock:
            if shard not in self._descriptors:
                path = self._table.shards[shard].path
                try:
                    self._descriptors[shard] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise StorageError(f"{path} cannot be opened: {error.strerror}") from error
            return self._descriptors[shard]

    def _fill(self, shard: int, offset: int, target: np.ndarray, name: str) -> None:
        """Read exactly len(target) bytes; Python retries EINTR, short reads are continued here."""
        descriptor, path = self._descriptor(shard), self._table.shards[shard].path
        view = target.data
        done = 0
        while done < len(view):
            try:
                got = os.preadv(descriptor, [view[done : done + MAX_READ_BYTES]], offset + done)
            except OSError as error:
                raise StorageError(
                    f"{path}: read of {name} failed at byte {offset + done:,}: {error.strerror}"
                ) from error
            if got == 0:
                raise StorageError(
                    f"{path} became shorter while in use: {name} at byte {offset:,}, "
                    f"expected {len(view):,} bytes, got {done:,}; fetch the file again"
                )
            done += got
