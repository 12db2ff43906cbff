"""Integer formats: records against their definition, dense layers on them bit for bit, errors of quantisation."""

import numpy as np
import pytest

from kernels.dense import linear
from kernels.quantised import FORMATS, QuantisedMatrix, quantise, row_bytes
from kernels.reference import quantised as reference
from tests.kernels.numerics import each_thread_count, normal, same_bits, same_on_any_threads, to_bf16, widen

SHAPES = [(1, 1, 1), (1, 16, 4), (1, 37, 5), (2, 7, 9), (3, 130, 31), (7, 96, 6), (33, 64, 6), (70, 257, 18)]


def exact(x: np.ndarray, matrix: QuantisedMatrix) -> np.ndarray:
    weights = reference.integers(matrix.format, matrix.rows, matrix.columns)
    return reference.linear(x, weights, matrix.scales)


def values(matrix: QuantisedMatrix) -> np.ndarray:
    """The weights as float64 [N, K]."""
    weights = reference.integers(matrix.format, matrix.rows, matrix.columns)
    return weights * np.float64(matrix.scales)[:, None]


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(("rows", "k", "n"), SHAPES, ids=str)
def test_layer_is_the_definition_bit_for_bit(form: str, rows: int, k: int, n: int) -> None:
    x, matrix = normal(0, rows, k), quantise(to_bf16(normal(1, n, k)), form)
    assert same_bits(linear(x, matrix), exact(x, matrix))


def test_layer_is_exact_over_the_widest_row(form: str) -> None:
    """33,792 columns of the largest integers and activations: 2^42 and more, beyond int32 and float32."""
    k = 33_792
    rows = np.full((8, row_bytes(form, k)), 0x7F if form == "int8" else 0xFF, np.uint8)
    if form == "int4":
        rows[:, k // 32 :] = 0x88  # nibbles of -8
    x = np.ones((3, k), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    matrix = QuantisedMatrix(form, rows, np.full(8, 0.5, np.float32), k)
    assert same_bits(linear(x, matrix), exact(x, matrix))


def test_rows_may_start_anywhere(form: str) -> None:
    x, matrix = normal(2, 3, 200), quantise(to_bf16(normal(3, 9, 200)), form)
    expected = linear(x, matrix)
    for offset in (1, 2, 5, 17, 63):
        memory = np.empty(matrix.rows.size + offset, np.uint8)
        rows = memory[offset:].reshape(matrix.rows.shape)
        rows[:] = matrix.rows
        assert same_bits(linear(x, QuantisedMatrix(form, rows, matrix.scales, 200)), expected)


@pytest.mark.parametrize(("k", "n"), [(37, 5), (128, 8), (577, 11)])
def test_a_row_alone_is_that_row_among_many(form: str, k: int, n: int) -> None:
    x, matrix = normal(4, 64, k), quantise(to_bf16(normal(5, n, k)), form)
    together = linear(x, matrix)
    assert all(same_bits(linear(x[r : r + 1], matrix), together[r : r + 1]) for r in range(64))
    assert same_bits(np.concatenate([linear(x[:9], matrix), linear(x[9:], matrix)]), together)


def test_a_block_of_rows_is_those_rows(form: str) -> None:
    x, matrix = normal(6, 2, 70), quantise(to_bf16(normal(7, 23, 70)), form)
    block = matrix.block(5, 12)
    assert block.shape == (7, 70)
    assert block.nbytes == 7 * (row_bytes(form, 70) + 4)
    assert np.shares_memory(block.rows, matrix.rows)
    assert same_bits(linear(x, block), np.ascontiguousarray(linear(x, matrix)[:, 5:12]))


def test_thread_count_changes_no_bit(form: str) -> None:
    x, bits = normal(8, 5, 200), to_bf16(normal(9, 203, 200))
    assert same_on_any_threads(lambda: linear(x, quantise(bits, form)))
    first, *rest = [quantise(bits, form).rows for _ in each_thread_count()]
    assert all(np.array_equal(first, other) for other in rest)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_input_spoils_its_row_only(form: str, bad: float) -> None:
    x, matrix = normal(10, 3, 40), quantise(to_bf16(normal(11, 6, 40)), form)
    clean = linear(x, matrix)
    x[1, 39] = bad
    spoilt = linear(x, matrix)
    assert np.isnan(spoilt[1]).all()
    assert same_bits(spoilt[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-38, 3e38, -3e38], ids=str)
def test_activations_at_their_limits(form: str, value: float) -> None:
    x, matrix = normal(12, 4, 128), quantise(to_bf16(normal(13, 5, 128)), form)
    x[:, 7] = value
    x[3] = value
    assert same_bits(linear(x, matrix), exact(x, matrix))


@pytest.mark.parametrize(("value", "scale"), [(0, 0), (0x0001, 0), (0x7F80, np.nan), (0xFFC1, np.nan)], ids=str)
def test_rows_that_integers_cannot_hold(form: str, value: int, scale: float) -> None:
    """Zeros and subnormals are zero, infinity and NaN are NaN, and the row beside them is as ever."""
    bits = to_bf16(normal(14, 2, 40))
    bits[0] = value
    matrix = quantise(bits, form)
    assert np.array_equal(matrix.scales[:1], [np.float32(scale)], equal_nan=True)
    assert not matrix.rows[0, -20 if form == "int8" else 2 :].any()
    assert same_bits(linear(normal(15, 2, 40), matrix)[:, 1:], linear(normal(15, 2, 40), matrix.block(1, 2)))


def test_int8_rounds_to_nearest() -> None:
    weights = normal(16, 20, 300)
    bits = to_bf16(weights)
    matrix = quantise(bits, "int8")
    error = np.abs(values(matrix) - widen(bits))
    assert (error <= 0.5001 * matrix.scales[:, None]).all()
    assert np.array_equal(np.abs(matrix.rows.view(np.int8).astype(int)).max(axis=1), np.full(20, 127))


@pytest.mark.parametrize(("form_name", "bound"), [("int8", 0.010), ("int4", 0.12)])
def test_error_on_normal_weights(form_name: str, bound: float) -> None:
    bits = to_bf16(normal(17, 16, 7168))
    weights = np.float64(widen(bits))
    error = np.linalg.norm(values(quantise(bits, form_name)) - weights) / np.linalg.norm(weights)
    assert error < bound


def test_released_width_error_of_activations(form: str) -> None:
    """16 bits of activations beside float64 ones: 2^-16 · max / rms, about 2e-5."""
    x, matrix = normal(18, 2, 7168), quantise(to_bf16(normal(19, 40, 7168)), form)
    full = np.float64(x) @ values(matrix).T
    assert np.abs(linear(x, matrix) - full).max() / np.abs(full).max() < 1e-4
