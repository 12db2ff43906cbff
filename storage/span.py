"""Where one expert lies on disk."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ExpertSpan:
    """Bytes of one expert in canonical order: w1 packed, w1 scale, w2 packed, w2 scale, w3 packed, w3 scale.

    `pieces` are (offset, nbytes) in `path`: one piece where the six tensors are contiguous (one read), else six.
    """

    path: Path
    pieces: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Payload bytes of the expert."""
        return sum(nbytes for _, nbytes in self.pieces)

    @property
    def offset(self) -> int:
        """First byte in the file: what a batch of reads is sorted by."""
        return self.pieces[0][0]
