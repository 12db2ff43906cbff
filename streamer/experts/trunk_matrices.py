"""The matrices of a trunk after a placement: pinned ones in memory, the others behind a ring."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from kernels.quantised import Matrix
from storage.arena import Arena
from storage.block_ring import BlockRing, RingCounters
from storage.blocks import read_blocks
from storage.reader import ExpertReader
from streamer.config.model import ModelConfig
from streamer.experts.matrices import TrunkMatrix, head_matrix, layer_matrices
from streamer.experts.placement import TrunkPlacement, block_bytes
from streamer.experts.trunk_files import TrunkFiles
from streamer.experts.weights import Projection

_CHECKERS = 4  # threads that check sums beside the reads; one does 3.8 GB/s


class RingMatrix:
    """A `StreamedMatrix` (streamer.experts.weights) whose row blocks come through a ring."""

    def __init__(self, files: TrunkFiles, matrix: TrunkMatrix, ring: BlockRing, at: int, first_rows: list[int]) -> None:
        """`at` is the number in the ring of the block that begins at row `first_rows[0]`; the others follow."""
        self._files = files
        self._matrix = matrix
        self._ring = ring
        self._at = at
        self._first_rows = first_rows

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._matrix.rows, self._matrix.columns

    def blocks(self) -> Iterator[tuple[int, Matrix]]:
        """Yield (first row, rows) in row order; see `StreamedMatrix.blocks`."""
        for i, first in enumerate(self._first_rows):
            with self._ring.take(self._at + i) as data:
                yield first, self._files.view(self._matrix, data, first)


class TrunkMatrices:
    """Every matrix of a trunk, by its tensor's name.

    Raises ValueError where something is streamed and the ring is smaller than `placement.smallest_ring`, StorageError
    where memory cannot be mapped.
    """

    def __init__(
        self, files: TrunkFiles, config: ModelConfig, placement: TrunkPlacement, reader: ExpertReader, poison: bool
    ) -> None:
        self._files = files
        self._reader = reader
        self._found: dict[str, Projection] = {}
        self._arenas: list[Arena] = []
        self._pinned: list[list[TrunkMatrix]] = []  # in groups that lie and are read together
        self._ring: BlockRing | None = None
        streamed: list[TrunkMatrix] = []
        for layer in range(config.n_layers):
            held = [matrix for matrix in layer_matrices(config, layer) if placement.pins(layer, matrix)]
            streamed += [matrix for matrix in layer_matrices(config, layer) if matrix not in held]
            self._pinned += [held] if held else []
        if placement.head_pinned:
            self._pinned.append([head_matrix(config)])
        else:
            streamed.append(head_matrix(config))
        if streamed:
            self._ring = self._open_ring(streamed, placement.ring_bytes, poison)
        self.nbytes = (placement.ring_bytes if streamed else 0) + sum(
            files.block(matrix).nbytes for group in self._pinned for matrix in group
        )
        """Bytes of matrices and ring; the pages around a matrix (at most 8 KB each) are not counted."""

    @property
    def counters(self) -> RingCounters:
        """The ring's; zeros where nothing is streamed."""
        return RingCounters() if self._ring is None else self._ring.counters

    def of(self, matrix: TrunkMatrix) -> Projection:
        """The matrix as the forward pass takes it."""
        return self._found[matrix.name]

    def load(self, progress: Callable[[int, int], None] | None) -> None:
        """Read what is pinned, group by group, and check the sums of what came from a pack meanwhile."""
        with ThreadPoolExecutor(_CHECKERS) as pool:
            checks: list[Future[None]] = []
            for done, group in enumerate(self._pinned, 1):
                for matrix, data in self._read(group):
                    self._found[matrix.name] = self._files.view(matrix, data)
                    checks.append(pool.submit(self._files.check, matrix, data))
                if progress is not None:
                    progress(done, len(self._pinned))
            for check in checks:
                check.result()

    def close(self) -> None:
        """Abandon what is on its way and give the memory back. Idempotent."""
        if self._ring is not None:
            self._ring.close()
        self._found.clear()
        for arena in self._arenas:
            arena.close()

    def _read(self, group: list[TrunkMatrix]) -> list[tuple[TrunkMatrix, np.ndarray]]:
        """Read matrices into one run of memory; returns the bytes of each."""
        blocks = [self._files.block(matrix) for matrix in group]
        arena = Arena(1, sum(block.window_bytes for block in blocks), touch=False, what="layer of the trunk")
        self._arenas.append(arena)
        memory, at = arena.slot(0), 0
        targets, found = [], []
        for matrix, block in zip(group, blocks, strict=True):
            targets.append((block, memory[at : at + block.window_bytes]))
            found.append((matrix, arena.slot_view(0, at + block.lead_bytes, block.nbytes)))
            at += block.window_bytes
        read_blocks(self._reader, sorted(targets, key=lambda target: (target[0].path, target[0].offset)))
        return found

    def _open_ring(self, streamed: list[TrunkMatrix], ring_bytes: int, poison: bool) -> BlockRing:
        cut = [self._files.row_blocks(matrix, block_bytes(ring_bytes)) for matrix in streamed]
        ring = BlockRing(self._reader, [block for blocks in cut for _, block in blocks], ring_bytes, poison=poison)
        at = 0
        for matrix, blocks in zip(streamed, cut, strict=True):
            self._found[matrix.name] = RingMatrix(self._files, matrix, ring, at, [first for first, _ in blocks])
            at += len(blocks)
        return ring
