"""The one order of addition: dot products against an exact emulation of sixteen fused lanes and a tree."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from kernels.dot import dot4_bf16, dot_bf16, dot_f32
from tests.kernels.numerics import dot16, fma32, normal, same_bits, to_bf16, widen

LENGTHS = [1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 100, 129, 577]


@njit
def _dots(a, b, w, out):
    """out = dot_f32(a, b), dot_bf16(a, w[0..3]), dot4_bf16(a, w[0..3]); w is uint16 [4, n]."""
    n = a.shape[0]
    out[0] = dot_f32(a.ctypes.data, b.ctypes.data, n)
    for i in range(4):
        out[1 + i] = dot_bf16(a.ctypes.data, w.ctypes.data + 2 * n * i, n)
    out[5], out[6], out[7], out[8] = dot4_bf16(a.ctypes.data, w.ctypes.data, 2 * n, n)


def dots(a: np.ndarray, b: np.ndarray, w: np.ndarray) -> np.ndarray:
    out = np.empty(9, np.float32)
    _dots(a, b, w, out)
    return out


def round_to_f32(value: Fraction) -> float:
    """A non-zero fraction in the range of normal float32, rounded to nearest, ties to even, in integers only."""
    exponent = math.floor(math.log2(abs(value)))
    for unit in (Fraction(2) ** (exponent - 24), Fraction(2) ** (exponent - 23), Fraction(2) ** (exponent - 22)):
        steps = round(value / unit)  # Python rounds halves to even
        if abs(steps) <= 2**24:
            return float(steps * unit)
    raise AssertionError(value)


def test_the_emulated_fma_rounds_once() -> None:
    a, b = normal(0, 4000), normal(1, 4000)
    c = normal(2, 4000) * np.float32(2.0) ** np.random.default_rng(3).integers(-40, 40, 4000).astype(np.float32)
    expected = [
        round_to_f32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    assert same_bits(fma32(a, b, c), np.array(expected, np.float32))


def test_the_emulated_fma_where_rounding_twice_would_be_wrong() -> None:
    """x² is a tie of float32; float64 cannot hold the 2^-80 that decides it."""
    x = np.array([1 + 2.0**-12], np.float32)  # x² = 1 + 2^-11 + 2^-24: half a unit above 1 + 2^-11
    above, below = np.array([2.0**-80], np.float32), np.array([-(2.0**-80)], np.float32)
    assert fma32(x, x, above)[0] == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert fma32(x, x, below)[0] == np.float32(1 + 2.0**-11)


@pytest.mark.parametrize("n", LENGTHS, ids=lambda n: f"n={n}")
def test_lanes_and_tree(n: int) -> None:
    a, b, w = normal(n, n), normal(n + 1, n), to_bf16(normal(n + 2, 4, n))
    expected = [dot16(a, b), *(dot16(a, widen(row)) for row in w)]
    got = dots(a, b, w)
    assert same_bits(got[:5], np.array(expected))
    assert same_bits(got[5:], got[1:5])


@settings(deadline=None, max_examples=25)
@given(n=st.integers(1, 80), seed=st.integers(0, 2**32 - 1), spread=st.integers(0, 60))
def test_lanes_and_tree_with_cancellation(n: int, seed: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (
        (rng.standard_normal(n) * 2.0 ** rng.integers(-spread // 2, spread // 2 + 1, n)).astype(np.float32)
        for _ in "ab"
    )
    w = to_bf16(rng.standard_normal((4, n)).astype(np.float32))
    got = dots(a, b, w)
    assert same_bits(got[:2], np.array([dot16(a, b), dot16(a, widen(w[0]))]))


def test_the_order_is_visible() -> None:
    """2^24 + 1 loses the 1 in float32, so a cancelled 2^24 shows which sums come first."""
    ones, w = np.ones(32, np.float32), np.zeros((4, 32), np.uint16)

    def total(**at: float) -> float:
        a = np.zeros(32, np.float32)
        for name, value in at.items():
            a[int(name[1:])] = value
        return float(dots(a, ones, w)[0])

    big = 2.0**24
    assert total(i0=big, i16=1, i1=-big) == 0  # 0 and 16 share a lane
    assert total(i0=big, i8=1, i1=-big) == 0  # then lanes eight apart
    assert total(i0=big, i4=1, i1=-big) == 0  # then four apart
    assert total(i0=big, i2=1, i1=-big) == 0  # then two apart
    assert total(i0=big, i3=-1, i1=-big) == 0  # lane 3 joins lane 1, where its 1 is lost as well
    assert total(i0=big, i1=1, i2=-big) == 1  # the neighbour comes last


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 20, 36])
def test_not_a_number_comes_out(bad: float, at: int) -> None:
    a = np.ones(37, np.float32)
    a[at] = bad
    assert not np.isfinite(dots(a, np.ones(37, np.float32), to_bf16(np.ones((4, 37), np.float32)))).any()


def test_a_tail_reads_nothing_beyond_its_end() -> None:
    memory = np.full(64, np.nan, np.float32)
    memory[:19] = 1
    w = np.full(200, 0x7FC0, np.uint16)  # NaN
    w[:76] = 0x3F80  # 1.0
    assert dots(memory[:19], memory[:19], w[:76].reshape(4, 19)).tolist() == [19.0] * 9
