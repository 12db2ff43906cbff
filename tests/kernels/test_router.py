"""The router: selection by biased score, weights without it, ties, NaN, bits."""

import numpy as np
import pytest

from kernels.reference import router as reference
from kernels.router import route
from tests.kernels.numerics import normal, same_bits, same_on_any_threads


def no_bias(n: int) -> np.ndarray:
    return np.zeros(n, np.float32)


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 1), (1, 8, 2), (3, 37, 5), (40, 64, 4), (5, 896, 16)])
@pytest.mark.parametrize("spread", [0.0, 0.2], ids=["no-bias", "bias"])
def test_matches_the_definition(rows: int, n: int, k: int, spread: float) -> None:
    logits, bias = normal(0, rows, n), normal(1, n) * np.float32(spread)
    experts, weights = route(logits, bias, k, 2.5)
    expected, exact = reference.route(np.float64(logits), np.float64(bias), k, 2.5)
    # Data without near-ties: the seeds give gaps far above 2^-22, so the ids and their order are equal.
    np.testing.assert_array_equal(experts, expected)
    # sigmoid 2 ulp, a sum of k positive terms, two divisions or products
    np.testing.assert_allclose(weights, exact, rtol=(8 + k) * 2.0**-24)


def test_bias_selects_but_does_not_weigh() -> None:
    logits = np.array([[0.0, 0.0, 2.0, -2.0]], np.float32)
    experts, weights = route(logits, np.array([0, 0, -1, 1], np.float32), 2, 1.0)
    assert experts.tolist() == [[3, 0]]  # 1.12 and 0.5 against 0.5 and -0.12
    low = 1 / (1 + np.exp(2))
    np.testing.assert_allclose(weights, [[low / (low + 0.5), 0.5 / (low + 0.5)]], rtol=1e-6)


def test_ties_go_to_the_lower_id() -> None:
    experts, weights = route(np.zeros((2, 50), np.float32), no_bias(50), 5, 1.0)
    assert experts.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert same_bits(weights, np.full((2, 5), 0.2))


def test_saturated_scores_are_ties() -> None:
    """σ is exactly 1 in float32 for logits of 20 and of 90, so that the lower id comes first."""
    logits = np.full((1, 6), -1, np.float32)
    logits[0, [2, 5]] = 20, 90
    assert route(logits, no_bias(6), 3, 1.0)[0].tolist() == [[2, 5, 0]]


def test_scaling_multiplies() -> None:
    logits = normal(2, 4, 30)
    _, one = route(logits, no_bias(30), 6, 1.0)
    _, four = route(logits, no_bias(30), 6, 4.0)
    np.testing.assert_allclose(one.sum(axis=1), 1, rtol=1e-6)
    assert same_bits(four, one * np.float32(4))


def test_vanishing_scores_do_not_divide_by_zero() -> None:
    experts, weights = route(np.full((1, 4), -1000, np.float32), no_bias(4), 2, 1.0)
    assert experts.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.0, 0.0]]


def test_a_row_alone_is_that_row_among_many() -> None:
    logits, bias = normal(3, 21, 97), normal(4, 97) * np.float32(0.1)
    experts, weights = route(logits, bias, 7, 1.0)
    for r in range(21):
        alone = route(logits[r : r + 1], bias, 7, 1.0)
        np.testing.assert_array_equal(alone[0], experts[r : r + 1])
        assert same_bits(alone[1], weights[r : r + 1])
    assert same_on_any_threads(lambda: np.hstack(route(logits, bias, 7, 1.0)).astype(np.float32))


@pytest.mark.parametrize("where", ["first", "unchosen", "all", "bias"])
def test_nan_gives_nan_weights_and_distinct_ids(where: str) -> None:
    logits, bias = normal(5, 2, 12), no_bias(12)
    logits[1, {"first": slice(1), "unchosen": slice(9, 10), "all": slice(None), "bias": slice(0)}[where]] = np.nan
    if where == "bias":
        bias[3] = np.nan
    experts, weights = route(logits, bias, 4, 1.0)
    assert np.isnan(weights[1]).all()
    assert np.isfinite(weights[0]).all() == (where != "bias")
    assert all(len(set(row)) == 4 and set(row) <= set(range(12)) for row in experts.tolist())
