"""Absorbed latent attention against the non-absorbed definition, causal bounds, blocks of 64 keys, bits."""

import itertools

import numpy as np
import pytest

from kernels.activation import exp_vector
from kernels.mla import KEY_BLOCK, attention
from kernels.reference import mla as reference
from tests.kernels.numerics import dot16, fma32, normal, relative, same_bits, same_on_any_threads, to_bf16, widen

Data = tuple[np.ndarray, np.ndarray, np.ndarray]


def data(rows: int, heads: int, widths: tuple[int, int, int, int], positions: int, seed: int = 0) -> Data:
    """q [T, H, n + r], kv_b bf16 bits [H, n + v, c], cache [P, c + r]; widths are (n, r, v, c)."""
    n, r, v, c = widths
    kv_b = to_bf16(normal(seed + 1, heads, n + v, c) * np.float32(c**-0.5))
    return normal(seed, rows, heads, n + r), kv_b, normal(seed + 2, positions, c + r)


def attend(q: np.ndarray, kv_b: np.ndarray, cache: np.ndarray, start: int, scale: float = 0.3) -> np.ndarray:
    nope = q.shape[2] - (cache.shape[1] - kv_b.shape[2])
    out = np.empty((*q.shape[:2], kv_b.shape[1] - nope), np.float32)
    attention(q, kv_b, cache, start, np.float32(scale), out)
    return out


def definition(q: np.ndarray, kv_b: np.ndarray, cache: np.ndarray, start: int, scale: float = 0.3) -> np.ndarray:
    return reference.attention(np.float64(q), np.float64(widen(kv_b)), np.float64(cache), start, np.float32(scale))


@pytest.mark.parametrize(
    ("heads", "widths"),
    [(1, (1, 1, 1, 1)), (2, (8, 4, 8, 16)), (3, (7, 3, 5, 33)), (1, (128, 64, 128, 512))],
    ids=lambda v: str(v),
)
@pytest.mark.parametrize(("rows", "start"), [(1, 0), (5, 0), (1, 63), (3, 62), (2, 64), (4, 126), (1, 200)])
def test_matches_the_non_absorbed_definition(
    heads: int, widths: tuple[int, int, int, int], rows: int, start: int
) -> None:
    q, kv_b, cache = data(rows, heads, widths, start + rows)
    # Scores of size ~10 carry ~10 · c/16 fused roundings, hence ~3e-6 in a probability; the other order of products
    # (absorbed) is within that.
    assert relative(attend(q, kv_b, cache, start), definition(q, kv_b, cache, start)) < 1e-5


def test_one_key_returns_its_value() -> None:
    q, kv_b, cache = data(1, 2, (4, 2, 6, 16), 1)
    values = np.einsum("hvc,c->hv", np.float64(widen(kv_b))[:, 4:], np.float64(cache[0, :16]))
    np.testing.assert_allclose(attend(q, kv_b, cache, 0)[0], values, rtol=1e-5, atol=1e-6)


def test_the_shared_key_part_is_attended_to() -> None:
    """Equal latents: only q_r · k_r tells the keys apart, unrotated."""
    q, kv_b, cache = (
        np.zeros((1, 1, 3), np.float32),
        to_bf16(np.ones((1, 2, 1), np.float32)),
        np.zeros((2, 3), np.float32),
    )
    q[0, 0, 1:] = 1, 2  # one nope, two rope
    cache[:, 0] = 1, 5  # latents, which are the values
    cache[1, 1:] = 3, 1  # q_r · k_r = 5
    p = 1 / (1 + np.exp(-5 * 0.3))
    np.testing.assert_allclose(attend(q, kv_b, cache, 1), [[[1 - p + 5 * p]]], rtol=1e-6)


def test_the_future_is_not_read() -> None:
    q, kv_b, cache = data(3, 2, (4, 2, 4, 16), 150)
    first = attend(q, kv_b, cache, 70)
    cache[73:] = np.nan
    assert same_bits(attend(q, kv_b, cache, 70), first)
    cache[72] = np.nan
    later = attend(q, kv_b, cache, 70)
    assert same_bits(later[:2], first[:2])
    assert np.isnan(later[2]).all()


def test_bits_are_the_written_order() -> None:
    """Absorbed query, keys in blocks of 64 with a running maximum, latents added in order of position."""
    q, kv_b, cache = data(1, 1, (3, 2, 4, 19), 150)
    up, down = widen(kv_b[0, :3]), widen(kv_b[0, 3:])
    absorbed, context, total = np.zeros(19, np.float32), np.zeros(19, np.float32), np.float32(0)
    for n in range(3):
        absorbed = fma32(q[0, 0, n], up[n], absorbed)
    query = np.concatenate([absorbed, q[0, 0, 3:]])
    scores = np.array([dot16(query, key) for key in cache]) * np.float32(0.3)
    top = np.float32(-np.inf)
    for first in range(0, 150, 64):
        block = slice(first, first + 64)
        block_top = max(top, scores[block].max())
        rescale = exp_vector(np.array([top - block_top]))[0]
        total, context, top = total * rescale, context * rescale, block_top
        for p, latent in zip(exp_vector(scores[block] - top), cache[block, :19], strict=True):
            total, context = total + p, fma32(p, latent, context)
    expected = np.array([dot16(context / total, row) for row in down])
    assert same_bits(attend(q, kv_b, cache, 149)[0, 0], expected)


@pytest.mark.parametrize("cuts", [(1,), (60, 64), (64, 128), (33, 65, 131)], ids=str)
def test_chunks_change_no_bit(cuts: tuple[int, ...]) -> None:
    q, kv_b, cache = data(140, 2, (6, 3, 5, 24), 140)
    whole = attend(q, kv_b, cache, 0)
    edges = (0, *cuts, 140)
    parts = [attend(q[a:b], kv_b, cache, a) for a, b in itertools.pairwise(edges)]
    assert same_bits(np.concatenate(parts), whole)


def test_a_row_alone_is_that_row_among_many() -> None:
    q, kv_b, cache = data(140, 2, (6, 3, 5, 24), 140)
    whole = attend(q, kv_b, cache, 0)
    for t in (0, 1, 62, 63, 64, 65, 127, 128, 139):
        assert same_bits(attend(q[t : t + 1], kv_b, cache, t), whole[t : t + 1])
        assert same_bits(attend(q[t : t + 1], kv_b, cache[: t + 1], t), whole[t : t + 1])


def test_heads_and_threads_change_no_bit() -> None:
    q, kv_b, cache = data(5, 3, (6, 3, 5, 24), 100)
    whole = attend(q, kv_b, cache, 95)
    for h in range(3):
        alone = attend(np.ascontiguousarray(q[:, h : h + 1]), kv_b[h : h + 1], cache, 95)
        assert same_bits(alone, whole[:, h : h + 1])
    assert same_on_any_threads(lambda: attend(q, kv_b, cache, 95))


@pytest.mark.parametrize("growing", [True, False])
def test_large_scores_neither_overflow_nor_lose_the_maximum(growing: bool) -> None:
    """The running maximum moves in each of three blocks, or is all in the first: e^±1000 would overflow."""
    positions = 3 * KEY_BLOCK - 5
    q, kv_b, cache = data(1, 1, (4, 2, 4, 16), positions)
    slope = np.linspace(-1000, 1000, positions, dtype=np.float32)
    q[0, 0, 4:], cache[:, 16], cache[:, 17] = 1, slope if growing else -slope, 0
    got = attend(q, kv_b, cache, positions - 1)
    assert relative(got, definition(q, kv_b, cache, positions - 1)) < 1e-4  # scores of 300 carry 2e-5


@pytest.mark.parametrize("where", ["query", "key", "shared"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_input_gives_nan(where: str, bad: float) -> None:
    q, kv_b, cache = data(1, 2, (4, 2, 4, 16), 90)
    q[0, 0, 5] = 1  # a score of minus infinity is a key of weight 0 and no error: see that one head has plus
    if where == "query":
        q[0, :, 5] = bad
    else:
        cache[3, 0 if where == "key" else 17] = bad
    assert not np.isfinite(attend(q, kv_b, cache, 89)).all()
