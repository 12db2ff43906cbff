"""The Attention Residuals mix: against float64, hand cases, bits free of rows and threads."""

import numpy as np
import pytest

from kernels.activation import exp_vector
from kernels.attn_res import mix
from kernels.reference import attn_res as reference
from tests.kernels.numerics import dot16, fma32, normal, same_bits, same_on_any_threads

EPS = 1e-5


def data(count: int, rows: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sources of unlike size and a γ that gives scores of order 3."""
    sources = normal(seed, count, rows, width) * np.float32(2.0) ** np.arange(count, dtype=np.float32)[:, None, None]
    return sources, normal(seed + 1, width) * np.float32(3 / width**0.5)


@pytest.mark.parametrize("count", [1, 2, 3, 9], ids=lambda n: f"sources={n}")
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 37), (3, 64), (33, 100), (2, 7168)])
def test_matches_the_definition(count: int, rows: int, width: int) -> None:
    sources, gamma = data(count, rows, width)
    exact = reference.mix(np.float64(sources), np.float64(gamma), EPS)
    # A score of size up to ~10 carries ~10 · 2^-22, which is a relative error of a share; results are sums that may
    # cancel, so the error is against the largest source.
    assert np.abs(mix(sources, count, gamma, EPS) - exact).max() <= 3e-6 * np.abs(sources).max()


def test_one_source_is_a_copy() -> None:
    sources, gamma = data(3, 4, 50)
    sources[0, 0, :3] = -0.0, 1e-42, 3e38 / 1e20
    assert same_bits(mix(sources, 1, gamma, EPS), sources[0])


def test_only_the_first_sources_are_read() -> None:
    sources, gamma = data(5, 2, 33)
    first = mix(np.ascontiguousarray(sources[:3]), 3, gamma, EPS)
    sources[3:] = np.nan
    assert same_bits(mix(sources, 3, gamma, EPS), first)


def test_by_hand() -> None:
    """Two sources ±c·1 with γ = 1/D: scores are the signs (eps aside), so shares are 1/(1 + e^-2) and the rest."""
    sources = np.stack([np.full((1, 8), 2.0), np.full((1, 8), -6.0)]).astype(np.float32)
    got = mix(sources, 2, np.full(8, 1 / 8, np.float32), 0.0)
    share = 1 / (1 + np.exp(-2))
    np.testing.assert_allclose(got, np.full((1, 8), 2 * share - 6 * (1 - share)), rtol=1e-6)


def test_equal_sources_mix_to_themselves() -> None:
    sources = np.repeat(normal(4, 1, 2, 20), 4, axis=0)
    assert same_bits(mix(sources, 4, np.ones(20, np.float32), EPS), sources[0])  # quarters add up exactly


def test_large_scores_do_not_overflow() -> None:
    sources, gamma = data(4, 3, 64)
    got = mix(sources, 4, gamma * np.float32(1e4), EPS)
    exact = reference.mix(np.float64(sources), np.float64(gamma) * 1e4, EPS)
    assert np.abs(got - exact).max() <= 1e-2 * np.abs(sources).max()  # scores of 1e4 carry an error of 1e-3


def test_bits_are_the_written_order() -> None:
    """Shares from sixteen-lane scores; sources added in their order, fused."""
    sources, gamma = data(4, 2, 53)
    got = mix(sources, 4, gamma, EPS)
    for r in range(2):
        rows = sources[:, r]
        scores = [dot16(gamma, s) / np.sqrt(dot16(s, s) / np.float32(53) + np.float32(EPS)) for s in rows]
        powers = exp_vector(np.array(scores) - max(scores))
        total = np.float32(0)
        for power in powers:
            total += power
        expected = powers[0] / total * rows[0]
        for share, source in zip(powers[1:] / total, rows[1:], strict=True):
            expected = fma32(share, source, expected)
        assert same_bits(got[r], expected)


def test_a_row_alone_is_that_row_among_many() -> None:
    sources, gamma = data(9, 13, 83)
    together = mix(sources, 9, gamma, EPS)
    for r in range(13):
        alone = mix(np.ascontiguousarray(sources[:, r : r + 1]), 9, gamma, EPS)
        assert same_bits(alone, together[r : r + 1])
    assert same_on_any_threads(lambda: mix(sources, 9, gamma, EPS))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("source", [0, 2])
def test_a_bad_input_spoils_its_row_only(bad: float, source: int) -> None:
    sources, gamma = data(3, 3, 20)
    sources[source, 1, 5] = bad
    finite = np.isfinite(mix(sources, 3, gamma, EPS))
    assert not finite[1].any()
    assert finite[[0, 2]].all()
