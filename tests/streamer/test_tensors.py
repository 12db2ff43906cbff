"""The implied tensor set against the independent table in tests.checkpoints and the totals of k3-spec §2 and §5."""

import math
from collections import Counter

import pytest

from streamer.config.parse import parse_model_config
from streamer.config.tensors import COMPONENTS, VISION_COMPONENTS, component, expert_tensors, trunk_tensors
from tests.checkpoints import DTYPE_BYTES, RELEASED, Dims, make_config, shard_tables

# k3-spec §5; "final" is the rest of shard 94: three vectors of 7168 BF16 values.
TRUNK_BYTES = {
    "kda": 61_258_257_408,
    "mla": 11_145_412_608,
    "latent": 9_454_620_672,
    "shared": 24_310_185_984,
    "router": 1_182_074_880,
    "dense": 1_453_326_336,
    "norms": 7_999_488,
    "final": 4_697_663_488 - 2 * 2_348_810_240,
    "embed": 2_348_810_240,
    "head": 2_348_810_240,
    "projector": 92_289_024,
    "vision": 802_428_928,
}


def test_released_totals() -> None:
    config = parse_model_config(make_config(RELEASED), "config.json")
    trunk, experts = trunk_tensors(config), expert_tensors(config)
    found: Counter[str] = Counter()
    parameters = 0
    for name, (dtype, shape) in trunk.items():
        key = component(name, config)
        found[key] += DTYPE_BYTES[dtype] * math.prod(shape)
        parameters += math.prod(shape) if key not in VISION_COMPONENTS else 0
    assert dict(found) == TRUNK_BYTES
    assert parameters == 56_743_648_000
    assert experts.expert_bytes == 17_547_264
    assert len(experts.layers) * experts.n_experts == 82_432
    assert len(trunk) + 82_432 * 6 == 497_220


@pytest.mark.parametrize(
    "dims",
    [Dims(), Dims(vision=True), Dims(kda_heads=3, mla_heads=4, v_dim=24), Dims(first_dense=2, shared=1, experts=5)],
    ids=["default", "vision", "heads", "dense"],
)
def test_names_dtypes_and_shapes(dims: Dims) -> None:
    config = parse_model_config(make_config(dims), "config.json")
    experts = expert_tensors(config)
    implied = {name: (spec.dtype, spec.shape) for name, spec in trunk_tensors(config).items()}
    for layer in experts.layers:
        for expert in range(experts.n_experts):
            for part, (_, shape) in enumerate(experts.parts):
                implied[experts.name(layer, expert, part)] = ("U8", shape)
    written = {name: spec for table in shard_tables(dims).values() for name, spec in table.items()}
    assert implied == written
    assert {component(name, config) for name in implied} <= set(COMPONENTS)


def test_a_log_is_padded_to_the_head_dim() -> None:
    config = parse_model_config(make_config(RELEASED), "config.json")
    assert trunk_tensors(config)["language_model.model.layers.0.self_attn.A_log"] == ("F32", (128,))
