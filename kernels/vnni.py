"""MXFP4 blocks on AVX-512 with VNNI: 64 packed bytes, four 32-groups, byte products added up in int32.

`kernels.mxfp4_simd` is written once over the names of this file and of `kernels.avx2`. Defining a kernel with them on a
CPU without AVX-512 VNNI aborts the process inside LLVM: ask `kernels.cpu` first.

A quarter of the register is exactly one group, and bytes are looked up within quarters: so the scale of a group goes
into its table, (2 · value) << (exponent − base), and a whole row is one integer dot product.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.mxfp4 import TWICE_E2M1
from kernels.registers import (
    I8,
    I32,
    Register,
    call,
    load_as,
    memory_operations,
    nibble_operations,
    reduction_operations,
)

REACH = 4  # exponents in one reading of a row: 12 << 3 = 96 is the most that a byte holds with both signs
REGISTER_BYTES = 64
_BIAS = 96  # makes the tables unsigned
TABLES = np.concatenate([(TWICE_E2M1 << shift) + _BIAS for shift in range(REACH)]).astype(np.uint8)

register = Register(REGISTER_BYTES, "llvm.x86.avx512.pshuf.b.512")
zero, load = memory_operations(register)
low_nibbles, high_nibbles, look_up = nibble_operations(register)
limb_sum, byte_min, byte_max, least_and_most = reduction_operations(register)


@intrinsic
def load_tail(typingctx, address, count):
    """`count` < 64 bytes at an address, zeros behind them; nothing beyond is touched."""

    def codegen(context, builder, signature, args):
        lane = ir.Constant(register.bytes, [ir.Constant(I8, i) for i in range(REGISTER_BYTES)])
        undefined = ir.Constant(register.bytes, ir.Undefined)
        first = builder.insert_element(undefined, builder.trunc(args[1], I8), ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, REGISTER_BYTES), [ir.Constant(I32, 0)] * REGISTER_BYTES)
        mask = builder.icmp_unsigned("<", lane, builder.shuffle_vector(first, undefined, zeros))
        pointer = builder.inttoptr(args[0], register.bytes.as_pointer())
        loaded = [pointer, ir.Constant(I32, 1), mask, ir.Constant(register.bytes, None)]
        return builder.bitcast(call(builder, "llvm.masked.load.v64i8.p0", register.bytes, loaded), register.words)

    return register(types.intp, types.intp), codegen


@intrinsic
def load_scales(typingctx, address):
    """The scale bytes of a block's four groups, as an int32."""
    return types.int32(types.intp), lambda context, builder, signature, args: load_as(builder, args[0], I32)


@intrinsic
def scaling(typingctx, tables, scales, base):
    """The look-up table of each group, in its quarter: that of its exponent, or of nothing when outside the reach."""

    def codegen(context, builder, signature, args):
        tables, scales, base = args
        shift = builder.sub(register.spread_scales(builder, scales), register.splat(builder, base))
        inside = builder.icmp_unsigned("<", shift, register.repeat(REACH))
        index = builder.add(builder.shl(shift, register.repeat(2)), register.constant([0, 1, 2, 3] * 4))
        chosen = call(builder, "llvm.x86.avx512.permvar.si.512", register.words, [tables, index])
        return builder.select(inside, chosen, register.repeat(0x01010101 * _BIAS))

    return register(register, types.int32, types.int32), codegen


@njit(forceinline=True, error_model="numpy")
def group_table(tables, scale):
    """The table to look nibbles up in: the one that holds the scale."""
    return scale


@intrinsic
def _dot_bytes(typingctx, total, unsigned, signed):
    """total + Σ of four products of unsigned and signed bytes, in each int32 lane (VPDPBUSD: no saturation)."""

    def codegen(context, builder, signature, args):
        operands = [args[0], *register.as_bytes(builder, *args[1:])]
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", register.words, operands)

    return register(register, register, register), codegen


@njit(forceinline=True, error_model="numpy")
def accumulate(total, low, even, high, odd, scale):
    """total + Σ (low · even + high · odd), lane by lane."""
    return _dot_bytes(_dot_bytes(total, low, even), high, odd)


@njit(forceinline=True, error_model="numpy")
def row_bias(scales, sums, low, high):
    """What the bias of the tables adds to a row: `sums` int64 [groups + 1] are Σ q by group, the last one of all."""
    total = np.int64(0)
    for step in range(0, high - low + 1, REACH):
        total += (_BIAS * sums[sums.shape[0] - 1]) << step
    return total
