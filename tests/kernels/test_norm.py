"""RMS norm: against float64, bits free of the row count, values that are not numbers."""

import numpy as np
import pytest

from kernels.norm import rms_norm
from kernels.reference import norm as reference
from tests.kernels.numerics import dot16, normal, same_bits, same_on_any_threads

EPS = 1e-5


@pytest.mark.parametrize("width", [1, 3, 16, 33, 100, 3584, 7168], ids=lambda n: f"width={n}")
@pytest.mark.parametrize("rows", [1, 2, 17], ids=lambda n: f"rows={n}")
def test_matches_the_definition(rows: int, width: int) -> None:
    x, weight = normal(0, rows, width) * np.float32(3), normal(1, width)
    # Σx² is a sum of positive terms: relative error (width / 16 + 5) · 2^-24 at worst and halved by the root, in
    # practice a few 2^-24; root, division and two products round once each. 1e-6 is 17 · 2^-24.
    np.testing.assert_allclose(rms_norm(x, weight, EPS), reference.rms_norm(np.float64(x), weight, EPS), rtol=1e-6)


def test_hand_computed() -> None:
    # mean(x²) = (9 + 16) / 2 = 12.5, plus 12.5 inside the root: 5
    got = rms_norm(np.array([[3.0, -4.0]], np.float32), np.array([1.0, 2.0], np.float32), 12.5)
    np.testing.assert_allclose(got, [[0.6, -1.6]], rtol=2.0**-22)


def test_bits_are_the_written_order() -> None:
    x, weight = normal(2, 3, 71), normal(3, 71)
    scales = [np.float32(1) / np.sqrt(dot16(row, row) / np.float32(71) + np.float32(EPS)) for row in x]
    assert same_bits(rms_norm(x, weight, EPS), x * np.array(scales)[:, None] * weight)


def test_a_row_alone_is_that_row_among_many() -> None:
    x, weight = normal(4, 19, 100), normal(5, 100)
    together = rms_norm(x, weight, EPS)
    assert all(same_bits(rms_norm(x[r : r + 1], weight, EPS), together[r : r + 1]) for r in range(19))
    assert same_on_any_threads(lambda: rms_norm(x, weight, EPS))


def test_a_zero_row_stays_zero() -> None:
    assert not rms_norm(np.zeros((2, 5), np.float32), np.ones(5, np.float32), EPS).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_input_spoils_its_row_only(bad: float) -> None:
    x = normal(6, 3, 20)
    x[1, 7] = bad
    finite = np.isfinite(rms_norm(x, np.ones(20, np.float32), EPS))
    assert not finite[1, 7]
    assert finite[[0, 2]].all()
