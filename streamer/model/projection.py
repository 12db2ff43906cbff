"""Products with a matrix of the trunk, pinned or streamed: rows are independent, so the bits are the same."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kernels.dense import linear
from kernels.quantised import QuantisedMatrix
from streamer.experts.weights import Projection


def project(x: np.ndarray, matrix: Projection) -> np.ndarray:
    """y = x Wᵀ of float32 [R, K] and a matrix [N, K]; returns float32 [R, N].

    Rows of a streamed matrix are multiplied as they arrive; raises StorageError when their read fails.
    """
    if isinstance(matrix, np.ndarray | QuantisedMatrix):
        return linear(x, matrix)
    y = np.empty((x.shape[0], matrix.shape[0]), np.float32)
    for first, block in matrix.blocks():
        y[:, first : first + block.shape[0]] = linear(x, block)
    return y


@contextmanager
def whole(matrix: Projection) -> Iterator[np.ndarray]:
    """Lend a bf16 matrix [N, K] in one piece while the context is open; no other one may be used inside."""
    if isinstance(matrix, np.ndarray):
        yield matrix
        return
    assert not isinstance(matrix, QuantisedMatrix)
    for _, block in matrix.blocks():
        assert isinstance(block, np.ndarray)
        assert block.shape == matrix.shape
        yield block
