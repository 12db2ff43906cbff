"""Exact arithmetic, comparison of bits, and random data, for the kernel tests."""

from collections.abc import Callable, Iterator

import numba
import numpy as np

TWICE_FP4 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]  # twice the OCP E2M1 values, from k3-spec §2.4
_SPAN = 24  # widest exponent span that is added without shifting right
Q_MAX = 2**22 - 1  # the largest quantised activation
THREAD_COUNTS = (1, min(2, numba.config.NUMBA_NUM_THREADS))


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a · b + c of float32 arrays, rounded once.

    The product of two float32 is exact in float64 (24 + 24 ≤ 53 bits). Rounding the sum to float64 and then to float32
    would round twice, which can differ from rounding once; so the float64 sum is rounded to *odd*: if it is inexact
    (two-sum gives the error exactly) and its last bit is even, it is moved by one ulp towards the exact value. Rounding
    that to float32 equals rounding the exact sum, because 53 ≥ 24 + 2 (Boldo and Melquiond, 2008).
    """
    product, addend = np.float64(a) * np.float64(b), np.float64(c)
    total = np.asarray(product + addend)
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & even, np.nextafter(total, towards), total).astype(np.float32)


def dot16(a: np.ndarray, b: np.ndarray) -> np.float32:
    """Inner product of two float32 [N] in the order of kernels/dot.py, filled up with zeros.

    Element i goes to lane i mod 16, ascending, each step fused; then the lanes are added by halves: 8, 4, 2, 1.
    """
    x, y = (np.concatenate([v, np.zeros(-len(v) % 16, np.float32)]) for v in (a, b))
    lanes = np.zeros(16, np.float32)
    for first in range(0, len(x), 16):
        lanes = fma32(x[first : first + 16], y[first : first + 16], lanes)
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return lanes[0]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two float32 arrays are equal bit for bit (NaN equals itself, 0 differs from -0)."""
    a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def each_thread_count() -> Iterator[int]:
    """Set numba to 1, then 2 threads, and put the number back at the end."""
    before = numba.get_num_threads()
    try:
        for count in THREAD_COUNTS:
            numba.set_num_threads(count)
            yield count
    finally:
        numba.set_num_threads(before)


def same_on_any_threads(compute: Callable[[], np.ndarray]) -> bool:
    """Whether `compute` gives the same bits with one thread and with two."""
    first, *rest = [compute() for _ in each_thread_count()]
    return all(same_bits(first, other) for other in rest)


def ulps(actual: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance of float32 `actual` from float64 `exact` in units of the float32 spacing at `exact`."""
    spacing = np.float64(np.spacing(np.abs(exact).astype(np.float32)))
    return np.abs(np.float64(actual) - exact) / spacing


def normal(seed: int, *shape: int) -> np.ndarray:
    """Standard normal float32."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bits uint16 as float32: they are its upper half."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 cut to bf16 bits: uint16."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def relative(actual: np.ndarray, exact: np.ndarray) -> float:
    """Largest error against the largest magnitude of the exact result."""
    return float(np.abs(np.float64(actual) - exact).max() / np.abs(exact).max())


def integer_row(packed: np.ndarray, scales: np.ndarray, q: np.ndarray) -> tuple[int, int]:
    """(integer, exponent) of a row in Python integers: the row's exact value is integer · 2^exponent."""
    base = max(int(scales.min()), int(scales.max()) - _SPAN)
    total = 0
    for g, e in enumerate(scales.tolist()):
        dot = 0
        for j in range(16):
            byte = int(packed[16 * g + j])
            dot += TWICE_FP4[byte & 15] * int(q[32 * g + 2 * j]) + TWICE_FP4[byte >> 4] * int(q[32 * g + 2 * j + 1])
        total += dot << (e - base) if e >= base else dot >> (base - e)
    return total, base - 128


def expected_row(packed: np.ndarray, scales: np.ndarray, q: np.ndarray, scale: float) -> np.float32:
    """One product with the activation scale in float64, one conversion to float32."""
    total, exponent = integer_row(packed, scales, q)
    with np.errstate(over="ignore", under="ignore"):
        return np.float32(float(total) * float(np.float32(scale)) * 2.0**exponent)
