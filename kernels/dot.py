"""Inner products with one fixed order of addition: sixteen float32 lanes, fused, then a fixed tree.

Element i goes to lane i mod 16, ascending; the lanes are summed 8 + 8, 4 + 4, 2 + 2, 1 + 1. Every float reduction over
a row in this package is one of these, so a result depends on the two vectors and on nothing else.
"""

from numba import njit

from kernels.simd import vfma, vload, vload_bf16, vload_bf16_tail, vload_tail, vsum, vzero


@njit(forceinline=True, error_model="numpy")
def dot_f32(a, b, n):
    """Inner product of `n` float32 at two byte addresses."""
    whole = n - n % 16
    lanes = vzero()
    for i in range(0, whole, 16):
        lanes = vfma(vload(a + 4 * i), vload(b + 4 * i), lanes)
    if whole < n:
        lanes = vfma(vload_tail(a + 4 * whole, n - whole), vload_tail(b + 4 * whole, n - whole), lanes)
    return vsum(lanes)


@njit(forceinline=True, error_model="numpy")
def dot4_f32(a, b, stride, n):
    """Four inner products of `n` float32 at `a` with rows `stride` bytes apart: `dot_f32` four times, interleaved."""
    whole = n - n % 16
    p, q, r, s = vzero(), vzero(), vzero(), vzero()
    for i in range(0, whole, 16):
        value = vload(a + 4 * i)
        at = b + 4 * i
        p = vfma(value, vload(at), p)
        q = vfma(value, vload(at + stride), q)
        r = vfma(value, vload(at + 2 * stride), r)
        s = vfma(value, vload(at + 3 * stride), s)
    if whole < n:
        count = n - whole
        value = vload_tail(a + 4 * whole, count)
        at = b + 4 * whole
        p = vfma(value, vload_tail(at, count), p)
        q = vfma(value, vload_tail(at + stride, count), q)
        r = vfma(value, vload_tail(at + 2 * stride, count), r)
        s = vfma(value, vload_tail(at + 3 * stride, count), s)
    return vsum(p), vsum(q), vsum(r), vsum(s)


@njit(forceinline=True, error_model="numpy")
def dot_bf16(x, w, n):
    """Inner product of `n` float32 at byte address `x` with `n` bf16 at byte address `w`."""
    whole = n - n % 16
    lanes = vzero()
    for i in range(0, whole, 16):
        lanes = vfma(vload(x + 4 * i), vload_bf16(w + 2 * i), lanes)
    if whole < n:
        lanes = vfma(vload_tail(x + 4 * whole, n - whole), vload_bf16_tail(w + 2 * whole, n - whole), lanes)
    return vsum(lanes)


@njit(forceinline=True, error_model="numpy")
def dot4_bf16(x, w, stride, n):
    """Four inner products of one float32 row with bf16 rows `stride` bytes apart: `dot_bf16` four times, in turns."""
    whole = n - n % 16
    a, b, c, d = vzero(), vzero(), vzero(), vzero()
    for i in range(0, whole, 16):
        value = vload(x + 4 * i)
        at = w + 2 * i
        a = vfma(value, vload_bf16(at), a)
        b = vfma(value, vload_bf16(at + stride), b)
        c = vfma(value, vload_bf16(at + 2 * stride), c)
        d = vfma(value, vload_bf16(at + 3 * stride), d)
    if whole < n:
        count = n - whole
        value = vload_tail(x + 4 * whole, count)
        at = w + 2 * whole
        a = vfma(value, vload_bf16_tail(at, count), a)
        b = vfma(value, vload_bf16_tail(at + stride, count), b)
        c = vfma(value, vload_bf16_tail(at + 2 * stride, count), c)
        d = vfma(value, vload_bf16_tail(at + 3 * stride, count), d)
    return vsum(a), vsum(b), vsum(c), vsum(d)
