"""MXFP4: nibble order, every code, rows as exact integers, extreme scale bytes, the quantisation of activations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from kernels import mxfp4
from kernels.reference import mxfp4 as reference
from tests.kernels.numerics import Q_MAX, TWICE_FP4, expected_row, integer_row, normal, same_bits


@njit(error_model="numpy")
def _row_dots(packed, scales, q, scale, out):
    for r in range(packed.shape[0]):
        out[r] = mxfp4.row_dot(packed[r], scales[r], q, scale)


@njit(error_model="numpy")
def _quantise(x, q):
    return mxfp4.quantise_row(x, q)


def row_dots(packed: np.ndarray, scales: np.ndarray, q: np.ndarray, scale: float) -> np.ndarray:
    out = np.empty(packed.shape[0], np.float32)
    _row_dots(packed, scales, q, np.float32(scale), out)
    return out


def quantise(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    q = np.full(x.shape[0], 99, np.int32)
    return q, np.float32(_quantise(x, q))


def random_rows(seed: int, rows: int, groups: int, low: int, high: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, 16 * groups), dtype=np.uint8)
    scales = rng.integers(low, high + 1, (rows, groups)).astype(np.uint8)
    return packed, scales, rng.integers(-Q_MAX, Q_MAX + 1, 32 * groups).astype(np.int32)


def test_low_nibble_first() -> None:
    """Each element of a group alone against a vector that holds its position."""
    position = np.arange(1, 33, dtype=np.int32)
    for element in range(32):
        packed = np.zeros((1, 16), np.uint8)
        packed[0, element // 2] = 0x02 if element % 2 == 0 else 0x20  # code 2 is 1.0
        scales = np.array([[127]], np.uint8)
        assert row_dots(packed, scales, position, 1.0)[0] == element + 1
        assert np.flatnonzero(reference.decode(packed, scales)[0]).tolist() == [element]


def test_every_code_in_both_halves_of_a_byte() -> None:
    packed = np.zeros((16, 16), np.uint8)
    packed[:, 3] = np.arange(16) | np.arange(16)[::-1] << 4
    scales = np.full((16, 1), 127, np.uint8)
    for element, codes in ((6, range(16)), (7, range(15, -1, -1))):
        q = np.zeros(32, np.int32)
        q[element] = 1
        expected = [TWICE_FP4[code] / 2 for code in codes]
        assert row_dots(packed, scales, q, 1.0).tolist() == expected
        assert reference.decode(packed, scales)[:, element].tolist() == expected


def test_a_scale_byte_belongs_to_32_consecutive_elements_of_its_row() -> None:
    packed = np.full((2, 48), 0x22, np.uint8)  # all ones
    scales = np.array([[127, 128, 129], [126, 127, 120]], np.uint8)
    for element in range(96):
        q = np.zeros(96, np.int32)
        q[element] = 1
        expected = 2.0 ** (scales[:, element // 32].astype(float) - 127)
        assert row_dots(packed, scales, q, 1.0).tolist() == expected.tolist()
        assert reference.decode(packed, scales)[:, element].tolist() == expected.tolist()


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 112], ids=lambda n: f"groups={n}")
@pytest.mark.parametrize(
    ("low", "high"), [(120, 122), (0, 2), (252, 254), (100, 132), (90, 140), (0, 254)], ids=lambda v: str(v)
)
def test_a_row_is_the_exact_integer(groups: int, low: int, high: int) -> None:
    packed, scales, q = random_rows(groups, 6, groups, low, high)
    expected = [expected_row(p, s, q, 3.1e-5) for p, s in zip(packed, scales, strict=True)]
    assert same_bits(row_dots(packed, scales, q, 3.1e-5), np.array(expected))


@settings(deadline=None, max_examples=40)
@given(
    groups=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
    low=st.integers(0, 254),
    span=st.integers(0, 254),
    scale=st.floats(2.0**-120, 2.0**100, width=32),
)
def test_a_row_is_the_exact_integer_for_any_bytes(groups: int, seed: int, low: int, span: int, scale: float) -> None:
    packed, scales, q = random_rows(seed, 2, groups, low, min(low + span, 254))
    expected = [expected_row(p, s, q, scale) for p, s in zip(packed, scales, strict=True)]
    assert same_bits(row_dots(packed, scales, q, scale), np.array(expected))


def test_the_largest_row_of_the_model_does_not_overflow() -> None:
    """112 groups of ±6 · 2^22 at a span of 24: 32 bits hold each group and 64 the sum."""
    packed = np.full((1, 16 * 112), 0x77, np.uint8)
    scales = np.full((1, 112), 140, np.uint8)
    scales[0, 0] = 116
    for sign in (1, -1):
        q = np.full(32 * 112, sign * Q_MAX, np.int32)
        total, _ = integer_row(packed[0], scales[0], q)
        assert 2**61 < abs(total) < 2**62
        assert same_bits(row_dots(packed, scales, q, 1e-9), np.array([expected_row(packed[0], scales[0], q, 1e-9)]))


def test_the_order_of_the_groups_changes_no_bit() -> None:
    packed, scales, q = random_rows(7, 1, 20, 60, 160)
    first = row_dots(packed, scales, q, 1e-3)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(20)
        moved = packed.reshape(1, 20, 16)[:, order].reshape(1, -1)
        assert same_bits(row_dots(moved, scales[:, order], q.reshape(20, 32)[order].ravel(), 1e-3), first)


@pytest.mark.parametrize("byte", [0, 1, 126, 127, 128, 253, 254])
def test_every_power_of_two(byte: int) -> None:
    packed = np.full((1, 16), 0x22, np.uint8)
    q = np.zeros(32, np.int32)
    q[0] = 1
    assert row_dots(packed, np.array([[byte]], np.uint8), q, 1.0)[0] == np.float32(2.0 ** (byte - 127))


def test_groups_far_below_the_largest_lose_only_bits_below_its_unit() -> None:
    """A span of 60: the low group is shifted right by 36 and rounded down."""
    packed = np.full((1, 32), 0x22, np.uint8)
    scales = np.array([[140, 80]], np.uint8)
    q = np.full(64, Q_MAX, np.int32)
    q[:32] = 0
    q[0] = 1
    got = float(row_dots(packed, scales, q, 1.0)[0])
    exact = float(reference.decode(packed, scales)[0] @ q)
    assert abs(got - exact) < 2.0 ** (140 - 127) * 2.0**-24


@pytest.mark.parametrize("group", [0, 1, 2])
def test_scale_byte_255_makes_the_row_nan(group: int) -> None:
    packed, scales, q = random_rows(0, 2, 3, 120, 122)
    clean = row_dots(packed, scales, q, 1.0)
    scales[0, group] = 255
    got = row_dots(packed, scales, q, 1.0)
    assert np.isnan(got[0])
    assert got[1] == clean[1]
    assert np.isnan(reference.decode(packed, scales)).any(axis=1).tolist() == [True, False]


def test_nan_activation_scale_gives_nan_and_large_ones_infinity() -> None:
    packed, q = np.full((1, 16), 0x22, np.uint8), np.full(32, 7, np.int32)
    assert np.isnan(row_dots(packed, np.array([[127]], np.uint8), q * 0, np.nan)[0])
    assert row_dots(packed, np.array([[254]], np.uint8), q, 1e30)[0] == np.inf


@pytest.mark.parametrize("n", [32, 96, 3584], ids=lambda n: f"n={n}")
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_quantised_activations_are_within_half_a_step(n: int, size: float) -> None:
    x = normal(n, n) * np.float32(size)
    q, scale = quantise(x)
    assert np.abs(q).max() == Q_MAX
    assert scale == np.float32(np.abs(x).max()) / np.float32(Q_MAX)
    # half a step, plus the rounding of x / scale: at most 2^22 · 2^-24 steps
    assert (np.abs(np.float64(scale) * q - x) <= np.float64(scale) * 0.75).all()


def test_quantise_by_hand() -> None:
    q, scale = quantise(np.array([Q_MAX, -Q_MAX, 0.5, 1.5, -0.5, 2.5, 0, -0.0], np.float32))
    assert scale == 1
    assert q.tolist() == [Q_MAX, -Q_MAX, 0, 2, 0, 2, 0, 0]  # halves to even


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, 0.0), (1e-45, 0.0), (4.9e-32, 0.0), (5e-32, None), (3.4028235e38, None)],
    ids=["zero", "subnormal", "subnormal-scale", "smallest", "largest"],
)
def test_quantise_extremes(value: float, expected: float | None) -> None:
    x = np.array([value, -value, 0, value], np.float32)
    q, scale = quantise(x)
    if expected is None:
        assert q.tolist() == [Q_MAX, -Q_MAX, 0, Q_MAX]
        assert scale == x[0] / np.float32(Q_MAX)
    else:
        assert scale == expected
        assert not q.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 17, 31])
def test_quantise_a_bad_value_gives_a_nan_scale(bad: float, at: int) -> None:
    x = normal(3, 32)
    x[at] = bad
    q, scale = quantise(x)
    assert np.isnan(scale)
    assert not q.any()
