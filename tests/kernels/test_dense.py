"""Dense layers: against float64, and the same bits at every row count and thread count."""

import numpy as np
import pytest

from kernels.dense import linear
from kernels.reference import dense as reference
from tests.kernels.numerics import dot16, normal, relative, same_bits, same_on_any_threads, to_bf16, widen

SHAPES = [(1, 1, 1), (1, 16, 4), (1, 37, 5), (2, 7, 9), (3, 130, 31), (33, 64, 6), (70, 257, 18)]


@pytest.mark.parametrize(("rows", "k", "n"), SHAPES, ids=lambda v: str(v))
def test_matches_the_definition(rows: int, k: int, n: int) -> None:
    x, weight = normal(0, rows, k), to_bf16(normal(1, n, k))
    exact = reference.linear(np.float64(x), reference.widen(weight))
    # A lane adds K/16 fused terms and the tree four more; each rounds by 2^-24 of a partial sum, which is bounded by
    # Σ|x w|: (K/16 + 4) · 2^-24 of that is the textbook bound.
    bound = (k / 16 + 5) * 2.0**-24 * (np.abs(np.float64(x)) @ np.abs(reference.widen(weight)).T)
    assert (np.abs(linear(x, weight) - exact) <= bound).all()


def test_released_width_error() -> None:
    x, weight = normal(0, 2, 7168), to_bf16(normal(1, 40, 7168))
    # errors average out: far below the bound above (448 + 5) · 2^-24 = 2.7e-5
    assert relative(linear(x, weight), reference.linear(np.float64(x), reference.widen(weight))) < 5e-7


@pytest.mark.parametrize(("k", "n"), [(37, 5), (128, 8), (577, 11)])
def test_a_row_alone_is_that_row_among_many(k: int, n: int) -> None:
    x, weight = normal(2, 21, k), to_bf16(normal(3, n, k))
    together = linear(x, weight)
    assert all(same_bits(linear(x[r : r + 1], weight), together[r : r + 1]) for r in range(21))
    assert same_bits(np.concatenate([linear(x[:8], weight), linear(x[8:], weight)]), together)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 6, 7, 8], ids=lambda n: f"n={n}")
def test_an_output_in_a_block_of_four_and_in_the_rest_has_the_same_bits(n: int) -> None:
    x, weight = normal(4, 2, 45), to_bf16(normal(5, 8, 45))
    assert same_bits(linear(x, weight[:n]), linear(x, weight)[:, :n])


def test_every_output_is_sixteen_fused_lanes() -> None:
    x, weight = normal(6, 2, 83), to_bf16(normal(7, 6, 83))
    expected = [[dot16(row, widen(w)) for w in weight] for row in x]
    assert same_bits(linear(x, weight), np.array(expected))


def test_thread_count_changes_no_bit() -> None:
    x, weight = normal(8, 5, 200), to_bf16(normal(9, 203, 200))
    assert same_on_any_threads(lambda: linear(x, weight))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_input_spoils_its_row_only(bad: float) -> None:
    x, weight = normal(10, 3, 40), to_bf16(normal(11, 6, 40))
    clean = linear(x, weight)
    x[1, 39] = bad
    spoilt = linear(x, weight)
    assert not np.isfinite(spoilt[1]).any()
    assert same_bits(spoilt[[0, 2]], clean[[0, 2]])
