"""exp, sigmoid, tanh in ulp of float64 over dense grids and at the extremes; SiTU; the finiteness flag.

Bounds are what kernels/activation.py promises. Worst of 24 million random arguments: exp 0.94, tanh 1.37, sigmoid
2.48, silu 2.68 ulp.
"""

import numpy as np
import pytest
from numba import njit

from kernels import activation
from kernels.activation import all_finite, exp_vector, gate_by_sigmoid, situ_glu
from kernels.reference import activation as reference
from tests.kernels.numerics import fma32, normal, same_bits, same_on_any_threads, ulps

LARGEST_EXP = 88.72283  # exp of more leaves float32
F = np.float32


@njit(error_model="numpy")
def _apply(x, sigmoid, tanh, silu):
    for i in range(x.shape[0]):
        sigmoid[i] = activation.sigmoid32(x[i])
        tanh[i] = activation.tanh32(x[i])
        silu[i] = activation.silu32(x[i])


def apply(x: np.ndarray) -> dict[str, np.ndarray]:
    names = ("sigmoid", "tanh", "silu")
    outs = [np.empty_like(x) for _ in names]
    _apply(x, *outs)
    return {"exp": exp_vector(x), **dict(zip(names, outs, strict=True))}


def grid(low: float, high: float, count: int = 200_003) -> np.ndarray:
    return np.linspace(low, high, count).astype(np.float32)


def around(*values: float) -> np.ndarray:
    """300 float32 neighbours on both sides of each value."""
    out = []
    for value in np.array(values, np.float32):
        bits = value.view(np.int32) + np.arange(-300, 301, dtype=np.int32)
        out.append(bits.view(np.float32))
    return np.concatenate(out)


def every_magnitude(low: float, high: float) -> np.ndarray:
    """Both signs, geometrically spaced."""
    x = np.geomspace(low, high, 100_003).astype(np.float32)
    return np.concatenate([x, -x])


ALL = np.concatenate(
    [grid(-87.3, LARGEST_EXP), grid(-1, 1), every_magnitude(1e-44, 80), around(0.625, -0.625, 0.3465736)]
)


def worst(name: str, x: np.ndarray) -> float:
    return float(ulps(apply(x)[name], getattr(reference, name)(np.float64(x))).max())


def test_exp_within_1_ulp() -> None:
    assert worst("exp", ALL) < 1
    halves = (np.arange(-125, 127) + 0.5) * np.log(2)  # where the reduction changes its integer
    assert worst("exp", around(*halves)) < 1


def test_exp_of_results_below_the_normal_numbers() -> None:
    """One more rounding, by the last factor of two: half a unit of the subnormal spacing on top."""
    assert worst("exp", grid(-103.9, -87.2)) < 1.5


def test_sigmoid_within_3_ulp() -> None:
    assert worst("sigmoid", ALL[ALL > -87.3]) < 3


def test_sigmoid_below_minus_88_72_is_zero() -> None:
    """e^-x is infinite there; the exact value is a subnormal number, below 2.9e-39."""
    x = grid(-150, -88.73)
    assert not apply(x)["sigmoid"].any()
    assert reference.sigmoid(np.float64(x)).max() < 2.0**-127


def test_tanh_within_2_ulp() -> None:
    assert worst("tanh", ALL) < 2


def test_silu_within_4_ulp() -> None:
    assert worst("silu", ALL[np.abs(ALL) > 1e-30]) < 4  # sigmoid's 3 and one product


def test_functions_stay_in_range_and_order() -> None:
    x = np.sort(grid(-200, 200))
    got = apply(x)
    assert ((got["sigmoid"] >= 0) & (got["sigmoid"] <= 1)).all()
    assert (np.abs(got["tanh"]) <= 1).all()
    assert same_bits(apply(-x)["tanh"][x != 0], -got["tanh"][x != 0])  # odd, bit for bit


def test_extremes() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 88.7229, -104], np.float32)
    got = apply(x)
    tiny = F(1e-45)
    np.testing.assert_array_equal(got["exp"], F([np.nan, np.inf, 0, 1, 1, 1, 1, np.inf, 0, np.inf, 0]))
    np.testing.assert_array_equal(got["sigmoid"], F([np.nan, 1, 0, 0.5, 0.5, 0.5, 0.5, 1, 0, 1, 0]))
    np.testing.assert_array_equal(got["tanh"], F([np.nan, 1, -1, 0, 0, tiny, -tiny, 1, -1, 1, -1]))


def test_exp_near_its_ends() -> None:
    largest = np.finfo(np.float32).max
    below, above = F(LARGEST_EXP), np.nextafter(F(88.72284), F(100))
    got = exp_vector(np.array([below, above, -103.97207, -103.98], np.float32))
    assert largest * F(0.9999) < got[0] <= largest
    assert got[1] == np.inf
    assert got[2] == np.finfo(np.float32).smallest_subnormal
    assert got[3] == 0


def test_exp_is_the_written_operations() -> None:
    """exp32 in exactly rounded numpy: no contraction, no reassociation, in any lane of a vectorised loop."""
    x = np.concatenate([grid(-87, 88.7, 4001), normal(0, 1001)])
    n = fma32(x, F(1.4426950408889634), F(12582912)) - F(12582912)
    r = fma32(n, F(2.12194440054690583e-4), fma32(n, F(-0.693359375), x))
    p = np.full_like(x, 1 / 5040)
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = fma32(p, r, F(coefficient))
    half = n.astype(np.int32) >> 1
    assert same_bits(exp_vector(x), np.ldexp(np.ldexp(p, half), n.astype(np.int32) - half))


def test_a_value_has_the_same_bits_anywhere_in_an_array() -> None:
    x = normal(1, 67) * F(5)
    whole = apply(x)
    for length in (1, 2, 7, 16, 31):
        for start in (0, 1, 13, 36):
            part = apply(x[start : start + length].copy())
            assert all(same_bits(part[name], whole[name][start : start + length]) for name in whole)


def situ(gate: np.ndarray, up: np.ndarray, gate_cap: float = 4, up_cap: float = 25) -> np.ndarray:
    out = np.empty_like(gate)
    situ_glu(gate, up, F(gate_cap), F(up_cap), out)
    return out


@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (5, 64), (64, 7)], ids=str)
@pytest.mark.parametrize("spread", [0.1, 3, 100])
def test_situ_matches_the_definition(shape: tuple[int, int], spread: float) -> None:
    gate, up = normal(2, *shape) * F(spread), normal(3, *shape) * F(spread)
    exact = reference.situ(np.float64(gate), np.float64(up), 4, 25)
    # two tanh of at most 2 ulp, a sigmoid of 3 and seven more roundings of half an ulp: under 12 · 2^-23 relative;
    # the absolute term is for gates below -88, where float32 gives 0
    np.testing.assert_allclose(situ(gate, up), exact, rtol=12 * 2.0**-23, atol=1e-36)


def test_situ_by_hand() -> None:
    gate = np.array([[0, 1, 1000, 1000, -1000, 1e-3]], np.float32)
    up = np.array([[5, 0, 1000, -1000, 1000, 1e-3]], np.float32)
    got = situ(gate, up)[0]
    assert got[:5].tolist() == [0, 0, 100, -100, 0]  # 4 · 25 at saturation; σ(-1000) = 0
    np.testing.assert_allclose(got[5], 1e-3 * 0.50025 * 1e-3, rtol=1e-5)  # near zero: g σ(g) u


def test_situ_gates_with_the_raw_value() -> None:
    """At g = 8, cap 4: 4 tanh(2) σ(8), not σ of the capped 3.86 (k3-spec §10 pitfall 7)."""
    got = situ(np.array([[8.0]], np.float32), np.array([[25.0]], np.float32))[0, 0]
    np.testing.assert_allclose(got, 4 * np.tanh(2) / (1 + np.exp(-8)) * 25 * np.tanh(1), rtol=1e-6)


def test_gate_by_sigmoid() -> None:
    values, gates = normal(4, 3, 45), normal(5, 3, 45)
    got = values.copy()
    gate_by_sigmoid(got, gates)
    assert same_bits(got, values * apply(gates.ravel())["sigmoid"].reshape(3, 45))


def test_rows_and_threads_change_no_bit() -> None:
    gate, up = normal(6, 9, 37) * F(4), normal(7, 9, 37) * F(30)
    together = situ(gate, up)
    assert all(same_bits(situ(gate[r : r + 1], up[r : r + 1]), together[r : r + 1]) for r in range(9))
    assert same_on_any_threads(lambda: situ(gate, up))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite(bad: float) -> None:
    x = normal(8, 3, 21)
    x[0, 0] = np.finfo(np.float32).max
    assert all_finite(x)
    for at in ((0, 0), (1, 16), (2, 20)):
        spoilt = x.copy()
        spoilt[at] = bad
        assert not all_finite(spoilt)
    assert all_finite(np.empty((0, 4), np.float32))


def test_nan_goes_through_situ() -> None:
    bad = np.array([[np.nan, 1.0, np.inf]], np.float32)
    one = np.ones((1, 3), np.float32)
    assert np.isnan(situ(bad, one)[0]).tolist() == [True, False, False]
    assert np.isnan(situ(one, bad)[0]).tolist() == [True, False, False]
