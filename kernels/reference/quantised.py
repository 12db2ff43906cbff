"""Definitions of the integer formats and of a dense layer on them (`kernels.quantised`), in int64 and float64."""

import numpy as np

GROUP = 32
TOP = 32767  # the largest quantised activation


def integers(format: str, rows: np.ndarray, columns: int) -> np.ndarray:  # noqa: A002
    """The integer weights int64 [N, K] of records uint8 [N, row_bytes]; a weight is integer · row scale."""
    if format == "int8":
        return rows.view(np.int8).astype(np.int64)
    groups = -(-columns // GROUP)
    subs = rows[:, :groups].astype(np.int64)
    words = np.ascontiguousarray(rows[:, groups:]).view("<u2").reshape(-1, groups, 1, 8).astype(np.int64)
    nibbles = words >> 4 * np.arange(4).reshape(4, 1) & 15  # [N, groups, 4, 8]: column 8j + l
    signed = np.where(nibbles > 7, nibbles - 16, nibbles)
    return (signed.reshape(-1, groups, GROUP) * subs[:, :, None]).reshape(-1, groups * GROUP)[:, :columns]


def quantise_activations(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finite float32 [R, K] as int64 [R, K] and float32 scales [R]: x ≈ scale · q, |q| ≤ 32767.

    The scale is the largest magnitude over 32767 in float32, the quotient is rounded to float32 and then to an integer,
    halves to even. A row whose scale is not a normal number is zero.
    """
    scale = np.abs(x).max(axis=1, initial=0, keepdims=True) / np.float32(TOP)
    zero = scale < np.finfo(np.float32).tiny
    q = np.where(zero, 0, np.rint(x / np.where(zero, np.float32(1), scale))).astype(np.int64)
    return q, np.where(zero, np.float32(0), scale)[:, 0]


def linear(x: np.ndarray, weights: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [R, N]: `x` float32 [R, K], `weights` int64 [N, K], `scales` float32 [N]; exact up to one conversion.

    Integer total · activation scale · row scale in float64, in this order, then to float32.
    """
    q, x_scale = quantise_activations(x)
    totals = (q @ weights.T).astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        return (totals * x_scale.astype(np.float64)[:, None] * scales.astype(np.float64)).astype(np.float32)
