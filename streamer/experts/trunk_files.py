"""Where a matrix of the trunk lies, in the checkpoint or in a pack, and what its bytes are as a matrix."""

from dataclasses import dataclass

import numpy as np

from kernels.quantised import Matrix, QuantisedMatrix
from storage.blocks import Block
from storage.checkpoint import Checkpoint
from storage.trunk_pack import TrunkPack
from streamer.experts.matrices import TrunkMatrix

_ROWS_TOGETHER = 4  # rows that a kernel multiplies together: a block that is cut elsewhere costs a little time


@dataclass(frozen=True, slots=True)
class TrunkFiles:
    """The files of a trunk: the checkpoint as shipped, and a pack of what is quantised (None for bf16)."""

    checkpoint: Checkpoint
    pack: TrunkPack | None = None

    def quantised(self, matrix: TrunkMatrix) -> TrunkPack | None:
        """The pack, where this matrix is in it."""
        return None if matrix.exact else self.pack

    def row_bytes(self, matrix: TrunkMatrix) -> int:
        """Bytes of one row in its file."""
        pack = self.quantised(matrix)
        return matrix.row_bytes if pack is None else pack.row_bytes(matrix.name)

    def block(self, matrix: TrunkMatrix) -> Block:
        """Where the rows of the matrix lie."""
        pack = self.quantised(matrix)
        return self.checkpoint.block(matrix.name) if pack is None else pack.block(matrix.name)

    def view(self, matrix: TrunkMatrix, data: np.ndarray, first_row: int = 0) -> Matrix:
        """Rows from `first_row` on as a matrix, from their bytes `data` uint8 [n · row_bytes]. No copy."""
        pack = self.quantised(matrix)
        if pack is None:
            return data.view(np.dtype("<u2")).reshape(-1, matrix.columns)
        rows = data.reshape(-1, self.row_bytes(matrix))
        scales = pack.scales(matrix.name)[first_row : first_row + len(rows)]
        return QuantisedMatrix(pack.format, rows, scales, matrix.columns)

    def check(self, matrix: TrunkMatrix, data: np.ndarray) -> None:
        """Compare the sum of the matrix's bytes with the pack's, where it is from one; raises StorageError."""
        pack = self.quantised(matrix)
        if pack is not None:
            pack.check(matrix.name, data)

    def row_blocks(self, matrix: TrunkMatrix, most_bytes: int) -> list[tuple[int, Block]]:
        """(first row, where it lies) of blocks of whole rows with at most `most_bytes`; one block if it must be."""
        row_bytes, everything = self.row_bytes(matrix), self.block(matrix)
        if matrix.whole:
            return [(0, everything)]
        step = max(1, most_bytes // row_bytes)
        step -= step % _ROWS_TOGETHER if step > _ROWS_TOGETHER else 0
        return [
            (first, everything.part(first * row_bytes, min(step, matrix.rows - first) * row_bytes))
            for first in range(0, matrix.rows, step)
        ]
