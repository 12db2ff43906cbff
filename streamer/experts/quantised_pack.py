"""The pack of a checkpoint's quantised matrices: opened where it is there, built first where it is not."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from kernels.quantised import quantise
from storage.block_ring import BlockRing
from storage.checkpoint import Checkpoint
from storage.reader import ExpertReader
from storage.trunk_pack import PackLayout, PackMatrix, TrunkPack
from storage.trunk_pack_builder import build_pack
from streamer.config.model import ModelConfig
from streamer.experts.matrices import TrunkMatrix, trunk_matrices
from streamer.experts.placement import MAX_BLOCK_BYTES, RING_BYTES, TrunkFormat, matrix_row_bytes
from streamer.experts.trunk_files import TrunkFiles

Progress = Callable[[str, int, int], None]  # (what, done, total)


def pack_layout(config: ModelConfig, trunk_format: TrunkFormat, fingerprint: str) -> PackLayout:
    """What the pack of a checkpoint with this `fingerprint` holds; `nbytes` is its size. Opens no file."""
    matrices = [
        PackMatrix(matrix.name, matrix.rows, matrix_row_bytes(matrix, trunk_format))
        for matrix in trunk_matrices(config)
        if not matrix.exact
    ]
    return PackLayout(fingerprint, trunk_format, matrices)


def pack_path(directory: Path, layout: PackLayout) -> Path:
    """Where the pack lies in a cache directory."""
    return directory / f"trunk-{layout.format}-{layout.fingerprint}.safetensors"


def open_pack(
    checkpoint: Checkpoint,
    config: ModelConfig,
    trunk_format: TrunkFormat,
    directory: Path,
    reader: ExpertReader,
    progress: Progress | None = None,
) -> TrunkPack:
    """Open the checkpoint's pack; build it first where it is missing, with ("trunk pack", bytes, bytes in all).

    While it is built it takes `RING_BYTES` of memory and a few blocks. Raises StorageError, a sentence.
    """
    layout = pack_layout(config, trunk_format, checkpoint.fingerprint)
    path = pack_path(directory, layout)
    if not path.exists():
        sources = {matrix.name: matrix for matrix in trunk_matrices(config)}

        def produce(missing: Sequence[PackMatrix]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            return _quantised_rows(checkpoint, [sources[m.name] for m in missing], trunk_format, reader)

        build_pack(path, layout, produce, None if progress is None else partial(progress, "trunk pack"))
    return TrunkPack(path, layout)


def _quantised_rows(
    checkpoint: Checkpoint, matrices: list[TrunkMatrix], trunk_format: TrunkFormat, reader: ExpertReader
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows and scales of matrices in their order; the next blocks are read while one is quantised."""
    shipped = TrunkFiles(checkpoint)
    blocks = [(matrix, block) for matrix in matrices for _, block in shipped.row_blocks(matrix, MAX_BLOCK_BYTES)]
    ring_bytes = min(RING_BYTES, sum(block.window_bytes for _, block in blocks))
    ring = BlockRing(reader, [block for _, block in blocks], ring_bytes, repeat=False)
    try:
        for i, (matrix, _) in enumerate(blocks):
            with ring.take(i) as data:
                bits = shipped.view(matrix, data)
                assert isinstance(bits, np.ndarray)
                quantised = quantise(bits, trunk_format)
            yield quantised.rows, quantised.scales
    finally:
        ring.close()
