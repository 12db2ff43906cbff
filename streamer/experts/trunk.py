"""The trunk: every weight that is not a routed expert. What is pinned lies in memory, the rest comes through a ring.

Pinned means anonymous memory, never a mapped file that the kernel may evict (design §7).
"""

from functools import partial
from pathlib import Path

import numpy as np

from storage.block_ring import RingCounters
from storage.checkpoint import Checkpoint
from storage.reader import ExpertReader
from streamer.config.model import ModelConfig
from streamer.config.tensors import TEXT_PREFIX
from streamer.experts.placement import TrunkPlacement, always_pinned_bytes
from streamer.experts.quantised_pack import Progress, open_pack
from streamer.experts.trunk_files import TrunkFiles
from streamer.experts.trunk_layers import read_head, read_layer, widen
from streamer.experts.trunk_matrices import TrunkMatrices
from streamer.experts.weights import HeadWeights, LayerWeights, MoeWeights, RouterWeights


class Trunk:
    """A `TrunkSource`; see `open_trunk`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        matrices: TrunkMatrices,
        layers: list[LayerWeights],
        head: HeadWeights,
        nbytes: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._matrices = matrices
        self._layers = layers
        self._head = head
        self.nbytes = nbytes
        """Bytes held in memory, the ring included; as `placement.pinned_bytes` counts them."""

    @property
    def counters(self) -> RingCounters:
        """What was streamed so far, and the time spent waiting for it."""
        return self._matrices.counters

    def layer(self, layer: int) -> LayerWeights:
        """Weights of a layer (0-based)."""
        return self._layers[layer]

    def router(self, layer: int) -> RouterWeights | None:
        """The router of a MoE layer, where it is held in memory."""
        weights = self._layers[layer]
        if not isinstance(weights.ffn, MoeWeights) or not isinstance(weights.ffn.gate, np.ndarray):
            return None
        return RouterWeights(weights.mlp_gamma, weights.post_attention_norm, weights.ffn.gate, weights.ffn.bias)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Embedding rows as float32 [R, D]."""
        distinct, inverse = np.unique(tokens, return_inverse=True)
        rows = self._checkpoint.read_rows(f"{TEXT_PREFIX}model.embed_tokens.weight", distinct)
        return widen(rows)[inverse]

    def head(self) -> HeadWeights:
        """Final norm and vocabulary projection."""
        return self._head

    def close(self) -> None:
        """Abandon what is read ahead and give the memory back; before the reader is closed. Idempotent."""
        self._matrices.close()


def open_trunk(
    checkpoint: Checkpoint,
    config: ModelConfig,
    placement: TrunkPlacement,
    reader: ExpertReader,
    cache_directory: Path,
    progress: Progress | None = None,
    *,
    poison: bool = False,
) -> Trunk:
    """Pin what `placement` pins and stream the rest through `reader`, which stays the caller's.

    int8 and int4 are read from a pack in `cache_directory`, which is built first where it is missing. Checked before
    use: sizes, fingerprint, and the sums of what is pinned; rows streamed from a pack are not summed again.
    `progress` is called with ("trunk pack", bytes, bytes in all) and ("trunk", layers, pinned layers). `poison`
    overwrites what the ring gives up; for tests.

    Raises StorageError: a read or a sum fails, memory cannot be mapped, the pack cannot be built. ConfigError: A_log.
    """
    pack = None
    if placement.format != "bf16":
        pack = open_pack(checkpoint, config, placement.format, cache_directory, reader, progress)
    matrices = TrunkMatrices(TrunkFiles(checkpoint, pack), config, placement, reader, poison)
    try:
        matrices.load(None if progress is None else partial(progress, "trunk"))
        layers = [read_layer(checkpoint, config, layer, matrices.of) for layer in range(config.n_layers)]
        head = read_head(checkpoint, config, matrices.of)
    except BaseException:
        matrices.close()
        raise
    return Trunk(checkpoint, matrices, layers, head, matrices.nbytes + always_pinned_bytes(config, placement.format))
