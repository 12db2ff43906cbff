"""exp, sigmoid, tanh, SiLU and SiTU-GLU in float32, written out so that their bits are ours.

Library versions differ between CPUs and between the vector body and the tail of an array; these are scalar functions
of explicit fused multiply-adds, so inlined into a loop they give the same bits in every lane of every instruction set.
Errors against float64: exp 1 ulp, tanh 2 ulp, sigmoid 3 ulp (tests/kernels/test_activation.py).
"""

import numpy as np
from numba import njit, prange

from kernels.simd import bits_to_f32, fma

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # 9 bits: n * _LN2_HIGH is exact for |n| < 2^15
_LN2_LOW = np.float32(-2.12194440054690583e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer
_OVERFLOW = np.float32(88.72284)
_UNDERFLOW = np.float32(-103.97208)
_TAYLOR = tuple(np.float32(value) for value in (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0))
# tanh(x) = x + x z Q(z), z = x^2 <= 0.625^2: Chebyshev fit of degree 5 in z, error 1e-9
_TANH = tuple(
    np.float32(value) for value in (0.00229584, -0.00834698, 0.02176996, -0.05395941, 0.13333304, -0.33333333)
)
_TANH_SMALL = np.float32(0.625)
_ONE, _TWO = np.float32(1.0), np.float32(2.0)


@njit(forceinline=True, error_model="numpy")
def exp32(x):
    """e^x; 0 below -103.97, inf above 88.72, NaN for NaN."""
    if not x <= _OVERFLOW:  # also NaN
        return x * np.float32(np.inf)
    if x < _UNDERFLOW:
        return np.float32(0.0)
    n = fma(x, _LOG2E, _ROUND) - _ROUND
    r = fma(n, -_LN2_HIGH, x)
    r = fma(n, -_LN2_LOW, r)
    p = _TAYLOR[0]
    p = fma(p, r, _TAYLOR[1])
    p = fma(p, r, _TAYLOR[2])
    p = fma(p, r, _TAYLOR[3])
    p = fma(p, r, _TAYLOR[4])
    p = fma(p, r, _TAYLOR[5])
    p = fma(p, r, _TAYLOR[6])
    p = fma(p, r, _TAYLOR[7])
    whole = np.int32(n)
    half = whole >> np.int32(1)  # two factors, so that neither leaves the range of normal numbers
    p *= bits_to_f32(np.uint32((half + np.int32(127)) << np.int32(23)))
    return p * bits_to_f32(np.uint32((whole - half + np.int32(127)) << np.int32(23)))


@njit(forceinline=True, error_model="numpy")
def sigmoid32(x):
    """1 / (1 + e^-x)."""
    return _ONE / (_ONE + exp32(-x))


@njit(forceinline=True, error_model="numpy")
def tanh32(x):
    """Hyperbolic tangent: a polynomial near zero, 1 - 2 / (e^2|x| + 1) elsewhere."""
    magnitude = abs(x)
    if magnitude < _TANH_SMALL:
        z = x * x
        p = _TANH[0]
        p = fma(p, z, _TANH[1])
        p = fma(p, z, _TANH[2])
        p = fma(p, z, _TANH[3])
        p = fma(p, z, _TANH[4])
        p = fma(p, z, _TANH[5])
        return fma(p * z, x, x)
    value = _ONE - _TWO / (exp32(_TWO * magnitude) + _ONE)
    return -value if x < np.float32(0.0) else value


@njit(forceinline=True, error_model="numpy")
def silu32(x):
    """x * sigmoid(x)."""
    return x * sigmoid32(x)


@njit(forceinline=True, error_model="numpy")
def situ32(gate, up, gate_cap, up_cap):
    """SiTU (k3-spec §3.7): [cap tanh(g / cap) sigmoid(g)] [cap' tanh(u / cap')]; the sigmoid takes the raw gate."""
    return (gate_cap * tanh32(gate / gate_cap)) * sigmoid32(gate) * (up_cap * tanh32(up / up_cap))


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def situ_glu(gate, up, gate_cap, up_cap, out):
    """SiTU-GLU of two float32 [R, N] into `out` [R, N]; caps are float32 scalars."""
    rows, width = gate.shape
    for r in prange(rows):
        for i in range(width):
            out[r, i] = situ32(gate[r, i], up[r, i], gate_cap, up_cap)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def gate_by_sigmoid(values, gates):
    """values *= sigmoid(gates), in place; both float32 [R, N]."""
    rows, width = values.shape
    for r in prange(rows):
        for i in range(width):
            values[r, i] *= sigmoid32(gates[r, i])


@njit(nogil=True, cache=True, error_model="numpy")
def exp_vector(values):
    """e^x of a float32 [N], as a new array."""
    out = np.empty_like(values)
    for i in range(values.shape[0]):
        out[i] = exp32(values[i])
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def all_finite(values):
    """Whether a float32 [R, N] holds neither NaN nor infinity. The flag of a layer: kernels never raise for data."""
    for r in range(values.shape[0]):
        for i in range(values.shape[1]):
            if not abs(values[r, i]) < np.float32(np.inf):
                return False
    return True
