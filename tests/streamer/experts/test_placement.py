"""The arithmetic of placements against the released sizes (k3-spec §5) and against brute force."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from streamer.config.load import load_model_config
from streamer.config.model import ModelConfig
from streamer.config.tensors import trunk_tensors
from streamer.experts import placement
from streamer.experts.matrices import layer_matrices, trunk_matrices
from streamer.experts.placement import FORMATS, TrunkPlacement, place_trunk, spread
from tests.checkpoints import RELEASED, make_config, write_json

GB = 10**9


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory = tmp_path_factory.mktemp("released")
    write_json(directory / "config.json", make_config(RELEASED))
    return load_model_config([directory])


def test_matrices_are_the_checkpoint_s(released: ModelConfig) -> None:
    """Name, shape and number: everything of the text trunk with two axes, but embeddings and AttnRes rows."""
    expected = {
        name: spec.shape
        for name, spec in trunk_tensors(released).items()
        if name.startswith("language_model.") and len(spec.shape) == 2 and spec.shape[0] > 1
    }
    del expected["language_model.model.embed_tokens.weight"]
    found = [(m.name, (m.rows, m.columns)) for m in trunk_matrices(released)]
    assert dict(found) == expected
    assert len(found) == len(expected)


def test_what_stays_exact(released: ModelConfig) -> None:
    """design §7: router, decay, b and kv_b are never quantised."""
    exact = Counter(m.field for m in trunk_matrices(released) if m.exact)
    assert exact == {"gate": 92, "f_a_proj": 69, "f_b_proj": 69, "b_proj": 69, "kv_b_proj": 24}
    assert {m.field for m in trunk_matrices(released) if m.whole} == {"kv_b_proj"}


@pytest.mark.parametrize(("trunk_format", "low", "high"), [("bf16", 111, 111.5), ("int8", 55, 58), ("int4", 28, 34)])
def test_released_sizes(released: ModelConfig, trunk_format: placement.TrunkFormat, low: float, high: float) -> None:
    """108.8 GB of layers and 2.35 of head as shipped (design §7); int8 half, int4 a bit over a quarter of that."""
    whole = TrunkPlacement.all_pinned(released, trunk_format)
    assert low * GB < placement.pinned_bytes(released, whole) < high * GB
    assert placement.streamed_bytes(released, whole) == 0
    assert placement.router_bytes(released) == 896 * 7168 * 2


def test_bf16_trunk_is_the_checkpoint_s_bytes(released: ModelConfig) -> None:
    """Tensor by tensor: bf16 vectors are held as float32, two AttnRes vectors become one, A_log loses its padding."""
    total = 0
    for name, spec in trunk_tensors(released).items():
        if not name.startswith("language_model.") or name.endswith("embed_tokens.weight"):
            continue
        count = math.prod(spec.shape)
        if name.endswith("res_proj.weight"):
            continue
        if name.endswith("A_log"):
            count = released.kda.n_heads
        is_matrix = len(spec.shape) == 2
        total += count * (2 if is_matrix else 4)
    assert placement.pinned_bytes(released, TrunkPlacement.all_pinned(released)) == total


@pytest.mark.parametrize("trunk_format", FORMATS)
def test_streamed_and_pinned_make_the_whole(released: ModelConfig, trunk_format: placement.TrunkFormat) -> None:
    some = TrunkPlacement(trunk_format, frozenset({0, 3, 50}), True, 2**29, False)
    read = placement.streamed_bytes(released, some)
    by_hand = sum(
        placement.matrix_bytes(matrix, trunk_format)
        for layer in range(released.n_layers)
        for matrix in layer_matrices(released, layer)
        if not some.pins(layer, matrix)
    )
    assert read == by_hand
    routers = placement.streamed_bytes(released, replace(some, pin_routers=True))
    assert read - routers == 90 * placement.router_bytes(released)  # of layers 3 and 50 they were pinned already


def test_smallest_ring(released: ModelConfig) -> None:
    """kv_b is the largest thing that must be whole: 24,576 × 512 bf16."""
    least = placement.smallest_ring(released, "bf16")
    assert least == 24576 * 512 * 2 + 8192
    assert placement.block_bytes(least) >= max(m.row_bytes for m in trunk_matrices(released))
    assert placement.block_bytes(placement.RING_BYTES) == 2**26


@pytest.mark.parametrize("budget_gb", [0.2, 2, 8, 20, 50, 110, 112])
def test_place_pins_what_fits(released: ModelConfig, budget_gb: float) -> None:
    budget = int(budget_gb * GB)
    placed = place_trunk(released, "bf16", budget)
    if placed is None:
        assert budget_gb < 2
        return
    used = placement.pinned_bytes(released, placed)
    assert used <= budget
    assert (placed == TrunkPlacement.all_pinned(released)) == (budget_gb == 112)
    if 4 < budget_gb < 112:
        assert placed.head_pinned
        largest = max(placement.layer_bytes(released, "bf16", layer) for layer in range(93))
        assert budget - used < 2 * largest


def test_spread_is_even() -> None:
    assert spread(0, 93) == frozenset()
    assert spread(93, 93) == frozenset(range(93))
    for count in range(1, 93):
        layers = sorted(spread(count, 93))
        assert len(layers) == count
        gaps = [b - a for a, b in pairwise(layers)]
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_checkpoint_without_latent_attention_needs_no_whole_matrix(tmp_path: Path, released: ModelConfig) -> None:
    least = placement.smallest_ring(replace(released, mla_layers=()), "bf16")
    assert least == 4 * (17 * 4096 + 8192)  # a row of the dense down projection: 33,792 bf16, in whole pages
