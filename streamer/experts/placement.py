"""Where the trunk's bytes are: which layers stay in memory and which are read again in every step. Arithmetic only.

Every count follows from the configuration; no file is opened. The memory ledger and the loader both stand on these, so
what was planned is what is held. GB = 1e9 bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kernels.quantised import row_bytes
from streamer.config.model import ModelConfig
from streamer.experts.matrices import TrunkMatrix, head_matrix, layer_matrices, trunk_matrices

TrunkFormat = Literal["bf16", "int8", "int4"]
FORMATS: tuple[TrunkFormat, ...] = ("bf16", "int8", "int4")

PAGE_BYTES = 4096
MAX_BLOCK_BYTES = 64 * 2**20
RING_BYTES = 512 * 2**20  # eight blocks: some being read by every thread, one being used, the rest waiting
_BLOCKS_IN_RING = 4  # at least: one in use, the others on their way


@dataclass(frozen=True, slots=True)
class TrunkPlacement:
    """What of the trunk is held in memory, and in which format. What is not pinned is read in every step.

    `pin_routers` holds the routers of streamed layers too: the prefetcher asks them ahead of their turn.
    `ring_bytes` is the memory through which the rest is read, 0 where everything is pinned.
    """

    format: TrunkFormat
    pinned_layers: frozenset[int]
    head_pinned: bool
    ring_bytes: int
    pin_routers: bool

    @classmethod
    def all_pinned(cls, config: ModelConfig, trunk_format: TrunkFormat = "bf16") -> "TrunkPlacement":
        """Everything in memory."""
        return cls(trunk_format, frozenset(range(config.n_layers)), True, 0, True)

    @classmethod
    def all_streamed(
        cls, trunk_format: TrunkFormat = "bf16", ring_bytes: int = RING_BYTES, pin_routers: bool = False
    ) -> "TrunkPlacement":
        """Nothing in memory but vectors and the ring."""
        return cls(trunk_format, frozenset(), False, ring_bytes, pin_routers)

    def pins(self, layer: int, matrix: TrunkMatrix) -> bool:
        """Whether a matrix of `layer` is held in memory."""
        return layer in self.pinned_layers or (matrix.router and self.pin_routers)


def matrix_row_bytes(matrix: TrunkMatrix, trunk_format: TrunkFormat) -> int:
    """Bytes of one row of `matrix` in memory and on the drive, its scale not counted."""
    if matrix.exact or trunk_format == "bf16":
        return matrix.row_bytes
    return row_bytes(trunk_format, matrix.columns)


def matrix_bytes(matrix: TrunkMatrix, trunk_format: TrunkFormat) -> int:
    """Bytes of `matrix` in memory and on the drive, its scales not counted."""
    return matrix.rows * matrix_row_bytes(matrix, trunk_format)


def layer_bytes(config: ModelConfig, trunk_format: TrunkFormat, layer: int) -> int:
    """Bytes of one layer's matrices: what pinning it costs and streaming it reads. Router not counted."""
    return sum(matrix_bytes(m, trunk_format) for m in layer_matrices(config, layer) if not m.router)


def router_bytes(config: ModelConfig) -> int:
    """Bytes of one layer's router, the same in every format."""
    return 2 * config.moe.n_experts * config.hidden_size


def head_bytes(config: ModelConfig, trunk_format: TrunkFormat) -> int:
    """Bytes of the vocabulary projection: what pinning it costs and streaming it reads."""
    return matrix_bytes(head_matrix(config), trunk_format)


def always_pinned_bytes(config: ModelConfig, trunk_format: TrunkFormat) -> int:
    """Bytes held whatever the placement: vectors and convolutions as float32, and the scale of every quantised row."""
    kda, mla, moe, hidden = config.kda, config.mla, config.moe, config.hidden_size
    kda_values = kda.width * (3 * kda.conv_kernel + 1) + kda.n_heads + kda.head_dim
    values = (
        (4 * config.n_layers + 2) * hidden
        + len(config.kda_layers) * kda_values
        + len(config.mla_layers) * (mla.q_lora_rank + mla.kv_lora_rank)
        + len(config.moe_layers) * (moe.n_experts + moe.latent_size)
    )
    return 4 * (values + quantised_rows(config, trunk_format))


def quantised_rows(config: ModelConfig, trunk_format: TrunkFormat) -> int:
    """Rows with a float32 scale, of all matrices together."""
    return 0 if trunk_format == "bf16" else sum(m.rows for m in trunk_matrices(config) if not m.exact)


def pinned_bytes(config: ModelConfig, placement: TrunkPlacement) -> int:
    """Bytes that a trunk with this placement holds, its ring included."""
    layers = sum(layer_bytes(config, placement.format, layer) for layer in placement.pinned_layers)
    routed = set(config.moe_layers)
    routers = len(routed if placement.pin_routers else routed & placement.pinned_layers)
    head = head_bytes(config, placement.format) if placement.head_pinned else 0
    always = always_pinned_bytes(config, placement.format)
    return always + layers + routers * router_bytes(config) + head + placement.ring_bytes


def streamed_bytes(config: ModelConfig, placement: TrunkPlacement) -> int:
    """Bytes that every step reads."""
    everything = pinned_bytes(config, TrunkPlacement.all_pinned(config, placement.format))
    return everything - (pinned_bytes(config, placement) - placement.ring_bytes)


def block_bytes(ring_bytes: int) -> int:
    """Most bytes of one row block in a ring of `ring_bytes`, so that some can be on their way while one is used."""
    return min(MAX_BLOCK_BYTES, ring_bytes // _BLOCKS_IN_RING - 2 * PAGE_BYTES)


def smallest_ring(config: ModelConfig, trunk_format: TrunkFormat) -> int:
    """Bytes of the least ring that can stream this model: its widest row in a block, its one whole matrix in one."""
    widest = max(matrix_row_bytes(m, trunk_format) for m in trunk_matrices(config))
    whole = max((m.nbytes for m in trunk_matrices(config) if m.whole), default=0)
    return max(_BLOCKS_IN_RING * (_pages(widest) + 2 * PAGE_BYTES), _pages(whole) + 2 * PAGE_BYTES)


def place_trunk(
    config: ModelConfig,
    trunk_format: TrunkFormat,
    budget_bytes: int,
    ring_bytes: int = RING_BYTES,
    pin_routers: bool = True,
) -> TrunkPlacement | None:
    """The placement that reads least per step within `budget_bytes`; None where even the ring does not fit.

    Everything where it fits; else the head if it fits, then as many layers as fit, evenly spread: while one of them is
    computed, the streamed ones behind it are read.
    """

    def fits(placement: TrunkPlacement) -> bool:
        return pinned_bytes(config, placement) <= budget_bytes

    whole = TrunkPlacement.all_pinned(config, trunk_format)
    if fits(whole):
        return whole

    def with_layers(count: int, head: bool) -> TrunkPlacement:
        return TrunkPlacement(trunk_format, spread(count, config.n_layers), head, ring_bytes, pin_routers)

    head = fits(with_layers(0, True))
    return _most(lambda count: with_layers(count, head), config.n_layers, fits)


def _most(
    make: Callable[[int], TrunkPlacement], most: int, fits: Callable[[TrunkPlacement], bool]
) -> TrunkPlacement | None:
    """The placement of the largest count that fits."""
    return next((made for count in range(most, -1, -1) if fits(made := make(count))), None)


def spread(count: int, n_layers: int) -> frozenset[int]:
    """`count` of the layers 0..n_layers - 1, in even distances."""
    return frozenset((2 * i + 1) * n_layers // (2 * count) for i in range(count))


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
