"""The ledger at released sizes (k3-spec §4, §5), and the refusal with its arithmetic."""

import pytest

from streamer.config.errors import UsageError
from streamer.config.model import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from streamer.config.options import EngineOptions, MemoryRequest
from streamer.engine import memory
from streamer.engine.limits import MemoryLimits

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
SLOT_BYTES = 4285 * 4096  # design §5: a page more than the payload, wherever that starts
PLENTY = MemoryLimits(4 * 10**12, 4 * 10**12, "this machine")


def plan(budget: str, context: int = 8192, **options: object) -> memory.MemoryPlan:
    return memory.plan_memory(K3, EXPERT_BYTES, context, EngineOptions(memory=budget, **options), PLENTY)  # type: ignore[arg-type]


def parts(made: memory.MemoryPlan) -> dict[str, int]:
    return {part.name: part.nbytes for part in made.parts}


def test_state_bytes_are_the_specification_s() -> None:
    """k3-spec §4: 434.1 MB of KDA states; float32 convolution inputs of three streams; float32 latents."""
    assert memory.kda_state_bytes(K3) == 434_110_464 + 2 * 15_261_696
    assert memory.latent_bytes(K3, 1000) == 1000 * 55_296


@pytest.mark.parametrize("budget", ["8GiB", "16GiB", "20GiB", "48GiB", "64GB", "100GiB", "192GiB", "2TB"])
def test_the_parts_never_exceed_the_budget_and_leave_less_than_a_slot(budget: str) -> None:
    made = plan(budget)
    assert made.budget_bytes == MemoryRequest.parse(budget).nbytes
    assert sum(parts(made).values()) + made.unused_bytes == made.budget_bytes
    assert made.unused_bytes >= 0
    assert parts(made)["expert slots"] == made.slots.total * SLOT_BYTES
    if made.slots_per_layer < 896:
        assert made.unused_bytes < SLOT_BYTES
        assert made.unused_reason == "less than one expert slot"
    else:
        assert made.unused_reason == "every expert is in memory"


def test_small_budgets_stream_the_trunk_and_serve_every_layer_from_shared_slots() -> None:
    made = plan("8GiB", trunk="bf16")
    assert made.placement.format == "bf16"
    assert len(made.placement.pinned_layers) <= 2
    assert made.placement.ring_bytes > 0
    assert made.slots_per_layer == 0
    assert made.slots.staging >= 32
    assert made.slots.staging - made.slots.speculation >= 16  # one token's experts always have a slot


def test_the_trunk_comes_before_experts_and_sixteen_slots_before_more() -> None:
    """design §7: int8 where bf16 does not fit beside 16 slots a layer, bf16 from there on."""
    assert plan("48GiB").placement.format == "int8"
    assert len(plan("48GiB").placement.pinned_layers) < 93
    made = plan("100GiB")
    assert made.placement.format == "int8"
    assert len(made.placement.pinned_layers) == 93
    assert made.slots_per_layer >= 16
    made = plan("192GiB")
    assert made.placement.format == "bf16"
    assert parts(made)["trunk bf16"] == pytest.approx(108_811_877_376 + 2_348_810_240, rel=1e-3)
    assert made.slots_per_layer >= 16


def test_what_does_not_divide_goes_to_the_last_layers() -> None:
    made = plan("100GiB")
    quotas = [made.slots.quotas[layer] for layer in K3.moe_layers]
    assert quotas == sorted(quotas)
    assert quotas[-1] - quotas[0] <= 1
    assert list(made.slots.quotas) == list(K3.moe_layers)


def test_the_prefill_chunk_follows_the_budget() -> None:
    assert plan("8GiB").prefill_chunk < plan("192GiB").prefill_chunk == 2048
    assert plan("8GiB", prefill_chunk=77).prefill_chunk == 77
    for budget in ("8GiB", "48GiB"):
        assert parts(plan(budget))["scratch"] <= 0.1 * plan(budget).budget_bytes


def test_slots_asked_for_are_what_stays() -> None:
    made = plan("100GiB", slots=3)
    assert set(made.slots.quotas.values()) == {3}
    assert made.unused_reason == "--slots 3 asks for no more"
    assert made.slots.staging - made.slots.speculation >= 13
    assert plan("100GiB", slots=3, prefetch=False).slots.speculation == 0


@pytest.mark.parametrize(("budget", "options"), [("2GiB", {}), ("12GiB", {"slots": 16}), ("100GiB", {"slots": 100})])
def test_what_does_not_fit_is_refused_with_the_arithmetic(budget: str, options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as refusal:
        plan(budget, **options)
    text = str(refusal.value)
    assert f"the budget is {MemoryRequest.parse(budget).nbytes / 2**30:.2f} GiB (--memory {budget})" in text  # type: ignore[operator]
    lines = [float(line.split()[0]) for line in text.splitlines()[1:-1]]
    assert sum(lines[:-1]) == pytest.approx(lines[-1], abs=0.05)
    assert lines[-1] > MemoryRequest.parse(budget).nbytes / 2**30  # type: ignore[operator]


def test_a_budget_beyond_what_is_free_is_refused_before_anything_else() -> None:
    limits = MemoryLimits(64 * 2**30, 20 * 2**30, "the cgroup /box")
    with pytest.raises(UsageError, match=r"48.00 GiB are more than the 20.00 GiB that are free of 64.00 GiB on the cg"):
        memory.budget_bytes(MemoryRequest.parse("48GiB"), limits)
    with pytest.raises(UsageError, match=r"--memory 75%: 48.00 GiB are more"):
        memory.budget_bytes(MemoryRequest.parse("75%"), limits)
    assert memory.budget_bytes(MemoryRequest.parse("25%"), limits)[0] == 16 * 2**30
    chosen, source = memory.budget_bytes(MemoryRequest.parse("auto"), limits)
    assert chosen == int(20 * 2**30 * 0.98)
    assert "75% of 64.00 GiB on the cgroup /box" in source


@pytest.mark.parametrize(
    ("text", "nbytes", "share"),
    [("48GiB", 48 * 2**30, None), ("1.5gb", 1_500_000_000, None), ("16G", 2**34, None), ("75%", None, 0.75)],
)
def test_sizes(text: str, nbytes: int | None, share: float | None) -> None:
    request = MemoryRequest.parse(text)
    assert (request.nbytes, request.share) == (nbytes, share)


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "120%", "8 GiBs", "8,5GiB", "nan", "inf", "1e9"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="--memory: expected a size such as 48GiB"):
        EngineOptions(memory=text)
