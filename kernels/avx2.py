"""MXFP4 blocks on AVX2: 32 packed bytes, two 32-groups, byte products added up in int16 and scaled on the way to int32.

`kernels.mxfp4_simd` is written once over the names of this file and of `kernels.vnni`. Defining a kernel with them on a
CPU without AVX2 aborts the process inside LLVM: ask `kernels.cpu` first.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.mxfp4 import TWICE_E2M1
from kernels.registers import (
    I16,
    I32,
    Register,
    call,
    load_as,
    memory_operations,
    nibble_operations,
    reduction_operations,
)

REACH = 9  # exponents in one reading of a row: 128 blocks of 2 · 12,288 · 2^8 fit an int32 lane
REGISTER_BYTES = 32
_BIAS = 12  # makes the table unsigned
TABLES = np.tile((TWICE_E2M1 + _BIAS).astype(np.uint8), 2)

register = Register(REGISTER_BYTES, "llvm.x86.avx2.pshuf.b")
zero, load = memory_operations(register)
low_nibbles, high_nibbles, look_up = nibble_operations(register)
limb_sum, byte_min, byte_max, least_and_most = reduction_operations(register)


@intrinsic
def load_tail(typingctx, address, count):
    """One group, `count` = 16 bytes, at an address; zeros behind it."""

    def codegen(context, builder, signature, args):
        half = ir.VectorType(I32, 4)
        order = register.constant([0, 1, 2, 3, 4, 4, 4, 4])
        return builder.shuffle_vector(load_as(builder, args[0], half), ir.Constant(half, None), order)

    return register(types.intp, types.intp), codegen


@intrinsic
def load_scales(typingctx, address):
    """The scale bytes of a block's two groups, as an int32."""

    def codegen(context, builder, signature, args):
        return builder.zext(load_as(builder, args[0], I16), I32)

    return types.int32(types.intp), codegen


@intrinsic
def scaling(typingctx, tables, scales, base):
    """2^(exponent − base) in every int16 of a group's half, zero for a group outside the reach."""

    def codegen(context, builder, signature, args):
        _, scales, base = args
        shift = builder.sub(register.spread_scales(builder, scales), register.splat(builder, base))
        inside = builder.icmp_unsigned("<", shift, register.repeat(REACH))
        factor = builder.shl(register.repeat(0x00010001), builder.select(inside, shift, register.repeat(0)))
        return builder.select(inside, factor, register.repeat(0))

    return register(register, types.int32, types.int32), codegen


@njit(forceinline=True, error_model="numpy")
def group_table(tables, scale):
    """The table to look nibbles up in: the same for every group."""
    return tables


@intrinsic
def accumulate(typingctx, total, low, even, high, odd, scale):
    """total + scale · Σ (low · even + high · odd), lane by lane.

    An int16 on the way holds four products: at most 4 · 24 · 128 = 12,288.
    """

    def codegen(context, builder, signature, args):
        total, low, even, high, odd, scale = args
        halves = ir.VectorType(I16, 16)
        pairs = [
            call(builder, "llvm.x86.avx2.pmadd.ub.sw", halves, register.as_bytes(builder, *operands))
            for operands in ((low, even), (high, odd))
        ]
        scaled = [builder.add(*pairs), builder.bitcast(scale, halves)]
        return builder.add(total, call(builder, "llvm.x86.avx2.pmadd.wd", register.words, scaled))

    return register(*[register] * 6), codegen


@njit(forceinline=True, error_model="numpy")
def row_bias(scales, sums, low, high):
    """What the bias of the table adds to a row: `sums` int64 [groups + 1] are Σ q by group, the last one of all."""
    total = np.int64(0)
    for g in range(scales.shape[0]):
        total += sums[g] << (np.int64(scales[g]) - low)
    return _BIAS * total
