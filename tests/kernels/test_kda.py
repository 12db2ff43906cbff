"""Kimi Delta Attention: each operation against float64, hand cases, and chunks of any size giving the same bits."""

import itertools

import numpy as np
import pytest

from kernels import kda
from kernels.delta_rule import advance
from kernels.reference import kda as reference
from tests.kernels.numerics import fma32, normal, relative, same_bits, same_on_any_threads

F = np.float32
JOURNAL = ("k", "v", "alpha", "beta")
NO_STATE = np.empty((0, 1, 1), np.float32)


def conv(u: np.ndarray, history: np.ndarray, taps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    recent, out = np.concatenate([history, u]), np.empty_like(u)
    kda.short_conv(recent, taps, out)
    return out, recent[len(u) :]


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9], ids=lambda n: f"tokens={n}")
@pytest.mark.parametrize(("channels", "taps"), [(1, 4), (37, 4), (64, 2), (8, 1)])
def test_conv_matches_the_definition(tokens: int, channels: int, taps: int) -> None:
    u, history, w = normal(0, tokens, channels), normal(1, taps - 1, channels), normal(2, channels, taps)
    exact, following = reference.short_conv(np.float64(u), np.float64(history), np.float64(w))
    got, got_following = conv(u, history, w)
    # four fused terms of order 1, then silu (4 ulp): 1e-6 of the largest
    assert relative(got, exact) < 1e-6
    assert same_bits(got_following, following)


def test_conv_taps_by_hand() -> None:
    """Tap 3 is the current token, tap 0 the one three before."""
    w = np.array([[1.0, 10.0, 100.0, 1000.0]], np.float32)
    history = np.array([[1.0], [2.0], [3.0]], np.float32)  # the oldest first
    got, following = conv(np.array([[4.0], [5.0]], np.float32), history, w)
    assert got[:, 0].tolist() == [4321.0, 5432.0]  # silu of so much is the identity
    assert following[:, 0].tolist() == [3.0, 4.0, 5.0]


def test_conv_history_shorter_and_longer_than_the_chunk() -> None:
    history = np.array([[1.0], [2.0], [3.0]], np.float32)
    w = np.ones((1, 4), np.float32)
    assert conv(np.array([[9.0]], np.float32), history, w)[1][:, 0].tolist() == [2.0, 3.0, 9.0]
    u = np.arange(5, dtype=np.float32)[:, None]
    assert conv(u, history, w)[1][:, 0].tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("cuts", [(1,), (3,), (5, 6), (2, 4, 6), tuple(range(1, 11))], ids=str)
def test_conv_in_chunks(cuts: tuple[int, ...]) -> None:
    u, history, w = normal(3, 11, 21), normal(4, 3, 21), normal(5, 21, 4)
    whole, last = conv(u, history, w)
    parts = []
    for first, end in itertools.pairwise((0, *cuts, 11)):
        out, history = conv(u[first:end], history, w)
        parts.append(out)
    assert same_bits(np.concatenate(parts), whole)
    assert same_bits(history, last)


def test_conv_output_may_be_a_view_and_threads_change_nothing() -> None:
    u, history, w = normal(3, 5, 33), normal(4, 3, 33), normal(5, 33, 4)
    assert same_on_any_threads(lambda: conv(u, history, w)[0])


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 17), (2, 3, 128)], ids=str)
def test_normalise_heads(shape: tuple[int, int, int]) -> None:
    x = normal(6, *shape)
    x[0, 0] *= F(1e-4)  # where the 1e-6 inside the root matters
    got = x.copy()
    kda.normalise_heads(got, F(128**-0.5))
    # a sum of squares (3 · 2^-24), root, division, product: 1e-6
    np.testing.assert_allclose(got, reference.normalise_heads(np.float64(x), 128**-0.5), rtol=1e-6)
    alone = x[-1:].copy()
    kda.normalise_heads(alone, F(128**-0.5))
    assert same_bits(alone, got[-1:])


def test_normalise_a_zero_head() -> None:
    x = np.zeros((1, 1, 5), np.float32)
    kda.normalise_heads(x, F(1))
    assert not x.any()


def run_decay(z: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray) -> np.ndarray:
    alpha = np.empty_like(z)
    kda.decay(z, np.exp(a_log), dt_bias, F(-5), alpha)
    return alpha


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 17), (2, 3, 128)], ids=str)
def test_decay(shape: tuple[int, int, int]) -> None:
    _, heads, d = shape
    z, a_log, dt_bias = normal(7, *shape) * F(3), normal(8, heads + 4), normal(9, heads, d)  # A_log is longer than H
    exact = reference.decay(np.float64(z), np.float64(a_log), np.float64(dt_bias), -5)
    # the exponent of size 5 carries ~6 ulp of itself: 5 · 6 · 2^-24 relative in α
    np.testing.assert_allclose(run_decay(z, a_log, dt_bias), exact, rtol=3e-6)
    assert same_bits(run_decay(z[:1], a_log, dt_bias), run_decay(z, a_log, dt_bias)[:1])


def test_decay_by_hand() -> None:
    z = np.array([[[-1000.0, 0.0, 1000.0], [1.0, 1.0, 1.0]]], np.float32)
    a_log = np.array([0.0, np.log(2.0), 9.0], np.float32)
    got = run_decay(z, a_log, np.zeros((2, 3), np.float32))
    sigmoid_2 = 1 / (1 + np.exp(-2.0))  # exp(A_log) = 2 belongs to the second head, all channels
    expected = [[1, np.exp(-2.5), np.exp(-5)], [np.exp(-5 * sigmoid_2)] * 3]
    np.testing.assert_allclose(got[0], expected, rtol=1e-6)


def test_sigmoid_rows() -> None:
    x, out = normal(10, 4, 7), np.empty((4, 7), np.float32)
    kda.sigmoid_rows(x, out)
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-np.float64(x))), rtol=3 * 2.0**-23)


def tokens(count: int, heads: int, d: int, seed: int = 11) -> dict[str, np.ndarray]:
    """Data of the kind the operations before produce: unit keys, α in (e^-5, 1], β in (0, 1)."""
    shape = (count, heads, d)
    q, k, v = (normal(seed + i, *shape) for i in range(3))
    kda.normalise_heads(q, F(d**-0.5))
    kda.normalise_heads(k, F(1))
    rng = np.random.default_rng(seed)
    alpha = np.exp(-5 * rng.random(shape) ** 4).astype(np.float32)
    return {"q": q, "k": k, "v": v, "alpha": alpha, "beta": rng.random((count, heads)).astype(np.float32)}


def recur(state: np.ndarray, data: dict[str, np.ndarray], keep: bool = True) -> tuple[np.ndarray, np.ndarray]:
    out, end = np.empty_like(data["v"]), np.empty_like(state) if keep else NO_STATE
    advance(state, *(data[name][:0] for name in JOURNAL), *data.values(), out, end)
    return out, end


def part(data: dict[str, np.ndarray], at: slice) -> dict[str, np.ndarray]:
    return {name: values[at] for name, values in data.items()}


@pytest.mark.parametrize(("heads", "d"), [(1, 1), (2, 7), (3, 16), (2, 33), (1, 128)])
@pytest.mark.parametrize("count", [1, 2, 40], ids=lambda n: f"tokens={n}")
def test_recurrence_matches_the_definition(heads: int, d: int, count: int) -> None:
    state, data = normal(14, heads, d, d), tokens(count, heads, d)
    exact, end = reference.recurrence(np.float64(state), *(np.float64(values) for values in data.values()))
    got, got_end = recur(state, data)
    # sums of d fused terms; decay ≤ 1 keeps old errors from growing (shared/kernels.md E: 2e-7)
    assert relative(got, exact) < 2e-6
    assert relative(got_end, end) < 2e-6


def test_two_tokens_by_hand() -> None:
    """d = 2, rows of S are keys. Token 1: S = k (β v)ᵀ. Token 2: decay the rows, then correct towards v."""
    q = np.array([[[1, 1]], [[1, 0]]], np.float32)
    k = np.array([[[1, 0]], [[1, 2]]], np.float32)
    v = np.array([[[4, 8]], [[10, 0]]], np.float32)
    alpha = np.array([[[0.25, 0.25]], [[0.5, 0.25]]], np.float32)
    beta = np.array([[0.5], [0.25]], np.float32)
    out, end = recur(np.zeros((1, 2, 2), np.float32), {"q": q, "k": k, "v": v, "alpha": alpha, "beta": beta})
    # token 1: S = [[2, 4], [0, 0]], o = [2, 4]
    # token 2: S = [[1, 2], [0, 0]]; r = [1, 2]; β (v - r) = [2.25, -0.5]; S = [[3.25, 1.5], [4.5, -1]]; o = [3.25, 1.5]
    assert out[:, 0].tolist() == [[2, 4], [3.25, 1.5]]
    assert end[0].tolist() == [[3.25, 1.5], [4.5, -1]]


def test_the_decay_of_a_row_comes_before_the_correction() -> None:
    state = np.array([[[1.0]]], np.float32)
    one = np.ones((1, 1, 1), np.float32)
    data = {"q": one, "k": one, "v": one * 3, "alpha": one / 2, "beta": one[0] / 2}
    assert recur(state, data)[1].item() == 1.75  # 0.5 + 0.5 (3 - 0.5)


@pytest.mark.parametrize("d", [5, 70])
def test_recurrence_bits_are_the_written_operations(d: int) -> None:
    state, data = normal(15, 1, d, d), tokens(3, 1, d)
    S = state[0].copy()
    for t in range(3):
        q, k, v, alpha = (data[name][t, 0] for name in ("q", "k", "v", "alpha"))
        S = alpha[:, None] * S
        r, o = np.zeros(d, np.float32), np.zeros(d, np.float32)
        for i in range(d):
            r = fma32(k[i], S[i], r)
        delta = data["beta"][t, 0] * (v - r)
        S = np.stack([fma32(k[i], delta, S[i]) for i in range(d)])
        for i in range(d):
            o = fma32(q[i], S[i], o)
        assert same_bits(recur(state, data)[0][t, 0], o)
    assert same_bits(recur(state, data)[1][0], S)


@pytest.mark.parametrize("cuts", [(1,), (8,), (4, 5), (2, 9, 11), tuple(range(1, 13))], ids=str)
@pytest.mark.parametrize("d", [16, 33, 64, 150])
def test_recurrence_in_chunks(cuts: tuple[int, ...], d: int) -> None:
    """Through end states, and through journals applied to the committed state: one and the same as all at once."""
    state, data = normal(16, 2, d, d), tokens(13, 2, d)
    whole, end = recur(state, data)
    by_state, by_journal = state.copy(), state.copy()
    for first, stop in itertools.pairwise((0, *cuts, 13)):
        chunk = part(data, slice(first, stop))
        out, by_state = recur(by_state, chunk)
        assert same_bits(out, whole[first:stop])
        before = by_journal.copy()
        assert same_bits(recur(by_journal, chunk, keep=False)[0], whole[first:stop])
        assert same_bits(by_journal, before)  # a step writes nothing
        nothing = part(chunk, slice(0))
        advance(by_journal, *(chunk[name] for name in JOURNAL), *nothing.values(), nothing["v"], NO_STATE)
    assert same_bits(by_state, end)
    assert same_bits(by_journal, end)


def test_heads_do_not_see_each_other_and_threads_change_nothing() -> None:
    state, data = normal(17, 4, 20, 20), tokens(6, 4, 20)
    out, end = recur(state, data)
    for h in range(4):
        alone = recur(state[h : h + 1], {name: np.ascontiguousarray(x[:, h : h + 1]) for name, x in data.items()})
        assert same_bits(alone[0], out[:, h : h + 1])
        assert same_bits(alone[1], end[h : h + 1])
    assert same_on_any_threads(lambda: recur(state, data)[0])


def test_a_nan_reaches_the_output_of_its_head_only() -> None:
    state, data = normal(18, 2, 8, 8), tokens(3, 2, 8)
    data["k"][1, 0, 3] = np.nan
    out, end = recur(state, data)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1:, 0]).any()
    assert np.isfinite(out[:, 1]).all()
    assert np.isnan(end[0]).any()


def gate(o: np.ndarray, weight: np.ndarray, gates: np.ndarray) -> np.ndarray:
    out = o.copy()
    kda.norm_and_gate(out, weight, F(1e-5), gates)
    return out


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 17), (2, 4, 128)], ids=str)
def test_norm_and_gate(shape: tuple[int, int, int]) -> None:
    o, gates, weight = normal(19, *shape), normal(20, *shape) * F(2), normal(21, shape[2])
    exact = reference.norm_and_gate(np.float64(o), np.float64(weight), 1e-5, np.float64(gates))
    np.testing.assert_allclose(gate(o, weight, gates), exact, rtol=2e-6)  # norm (1e-6) and sigmoid (3 ulp)
    together = gate(o, weight, gates)
    assert all(same_bits(gate(o[t : t + 1], weight, gates[t : t + 1]), together[t : t + 1]) for t in range(shape[0]))
    assert same_on_any_threads(lambda: gate(o, weight, gates))


def test_the_norm_comes_before_the_gate() -> None:
    """Gated first, a norm would undo a gate that is the same in all channels."""
    o, gates = np.full((1, 1, 4), 3, np.float32), np.zeros((1, 1, 4), np.float32)
    np.testing.assert_allclose(gate(o, np.ones(4, np.float32), gates), np.full((1, 1, 4), 0.5), rtol=1e-5)


def test_long_context_at_the_released_range_of_decay() -> None:
    """4,096 tokens in chunks of 512 against float64: log decays all over [-5, 0], from channels that forget at once to
    channels that never do."""
    count, heads, d = 4096, 2, 128
    data = tokens(count, heads, d, seed=21)
    depth = np.random.default_rng(22).random((1, heads, d)) ** 6  # most channels remember for long
    gate = depth * np.random.default_rng(23).random((count, heads, d))
    data["alpha"] = np.exp(-5 * gate).astype(np.float32)
    assert data["alpha"].min() < 0.01
    assert data["alpha"].max() == 1.0
    state, parts = np.zeros((heads, d, d), np.float32), []
    for first in range(0, count, 512):
        out, state = recur(state, part(data, slice(first, first + 512)))
        parts.append(out)
    exact, end = reference.recurrence(np.zeros((heads, d, d)), *(np.float64(values) for values in data.values()))
    assert np.linalg.norm(np.concatenate(parts) - exact) < 1e-4 * np.linalg.norm(exact)
    assert np.linalg.norm(state - end) < 1e-4 * np.linalg.norm(end)
