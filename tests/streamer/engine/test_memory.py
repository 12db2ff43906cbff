"""Slots from what is available, and the refusal with its arithmetic. Released sizes from k3-spec §4, §5."""

import subprocess
import sys

import pytest

from streamer.config.errors import UsageError
from streamer.config.model import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from streamer.engine import memory

K3 = ModelConfig(
    vocab_size=163840,
    hidden_size=7168,
    n_layers=93,
    dense_intermediate_size=33792,
    first_moe_layer=1,
    rms_norm_eps=1e-5,
    attn_res_block_size=12,
    situ_beta=4.0,
    situ_linear_beta=25.0,
    max_position_embeddings=1048576,
    bos_token_id=163584,
    eos_token_id=163586,
    pad_token_id=163839,
    mla_layers=(*range(3, 92, 4), 92),
    kda=KdaConfig(96, 128, 4, -5.0),
    mla=MlaConfig(96, 1536, 512, 128, 64, 128),
    moe=MoeConfig(896, 16, 2, 3072, 3584, 1.0),
    has_vision=False,
)
EXPERT_BYTES = 17_547_264
TRUNK_BYTES = 108_811_877_376 + 2_348_810_240  # layers and head


def _available(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: n_bytes)


def test_state_bytes_are_the_specification_s() -> None:
    """Two KDA states while a prompt is read, float32 convolution inputs twice, float32 latents."""
    expected = 2 * 434_110_464 + 2 * 2 * 15_261_696 + 1000 * 55_296
    assert memory.state_bytes(K3, 1000) == expected


def test_slots_are_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    _available(monkeypatch, 200 * 10**9)
    plan = memory.plan_memory(K3, TRUNK_BYTES, EXPERT_BYTES, 8192, None)
    room = 200 * 10**9 - TRUNK_BYTES - memory.state_bytes(K3, 8192) - memory.RESERVE_BYTES
    assert plan.arena_bytes <= 0.75 * room < plan.arena_bytes + 92 * EXPERT_BYTES
    assert plan.slots_per_layer == 40


def test_sequences_share_what_the_arena_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 200 GB the arena takes three quarters of the room; a 8,192-token state is 1.38 GB."""
    _available(monkeypatch, 200 * 10**9)
    plan = memory.plan_memory(K3, TRUNK_BYTES, EXPERT_BYTES, 8192, None)
    rest = 200 * 10**9 - TRUNK_BYTES - plan.arena_bytes - memory.RESERVE_BYTES
    assert plan.max_sequences == rest // memory.state_bytes(K3, 8192)
    assert 10 <= plan.max_sequences <= 20


def test_whole_pool_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    _available(monkeypatch, 3 * 10**12)
    assert memory.plan_memory(K3, TRUNK_BYTES, EXPERT_BYTES, 8192, None).slots_per_layer == 896


def test_one_token_s_experts_come_before_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    _available(monkeypatch, 140 * 10**9)
    assert memory.plan_memory(K3, TRUNK_BYTES, EXPERT_BYTES, 8192, None).slots_per_layer == 16


@pytest.mark.parametrize(("gb", "slots"), [(100, None), (135, None), (200, 60)])
def test_what_does_not_fit_is_refused_with_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch, gb: int, slots: int | None
) -> None:
    _available(monkeypatch, gb * 10**9)
    with pytest.raises(UsageError) as refusal:
        memory.plan_memory(K3, TRUNK_BYTES, EXPERT_BYTES, 8192, slots)
    text = str(refusal.value)
    assert f"{gb * 10**9 / 2**30:.2f} GiB are available" in text
    assert f"{TRUNK_BYTES / 2**30:.2f} GiB  trunk" in text
    assert "one token needs 16" in text


def test_fewer_slots_than_one_token_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    _available(monkeypatch, 200 * 10**9)
    with pytest.raises(UsageError, match="one token needs 16 experts"):
        memory.plan_memory(K3, TRUNK_BYTES, EXPERT_BYTES, 8192, 15)


def test_available_is_never_more_than_the_host_has() -> None:
    import psutil

    assert 0 < memory.available_bytes() <= psutil.virtual_memory().total


def test_address_space_limit_counts() -> None:
    """What `ulimit -v` leaves, in a process of its own."""
    code = (
        "import resource, psutil; used = psutil.Process().memory_info().vms; "
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30)); "
        "from streamer.engine.memory import available_bytes; print(available_bytes())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(run.stdout) < 2**30
