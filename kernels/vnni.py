"""Sixteen int32 lanes, or sixty-four bytes, as numba values: the AVX-512 VNNI operations that MXFP4 rows need.

Defining a kernel with these on a CPU that lacks them aborts the process inside LLVM, so ask `kernels.cpu` first.
Addresses are plain integers; loads may be unaligned. All arithmetic is on integers: nothing here can round.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_BYTES, _WORDS = ir.VectorType(_I8, 64), ir.VectorType(_I32, 16)


class Int32x16(types.Type):
    """Sixteen int32 lanes: a 512-bit register."""

    def __init__(self) -> None:
        super().__init__(name="int32x16")


i32x16 = Int32x16()


@register_model(Int32x16)
class _Int32x16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _WORDS)


def _words(*values):
    return ir.Constant(_WORDS, [ir.Constant(_I32, value) for value in values])


def _call(builder, name, result, args):
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def _splat(builder, scalar):
    undefined = ir.Constant(_WORDS, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, _words(*[0] * 16))


def _shuffle_bytes(builder, table, index):
    args = [builder.bitcast(table, _BYTES), builder.bitcast(index, _BYTES)]
    return builder.bitcast(_call(builder, "llvm.x86.avx512.pshuf.b.512", _BYTES, args), _WORDS)


@intrinsic
def izero(typingctx):
    """Sixteen zeros."""

    def codegen(context, builder, signature, args):
        return ir.Constant(_WORDS, None)

    return i32x16(), codegen


@intrinsic
def iload(typingctx, address):
    """Sixty-four bytes at a byte address."""

    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], _WORDS.as_pointer()), align=1)

    return i32x16(types.intp), codegen


@intrinsic
def iload_tail(typingctx, address, count):
    """`count` < 64 bytes at a byte address, zeros behind them; nothing beyond is touched."""

    def codegen(context, builder, signature, args):
        lane = ir.Constant(ir.VectorType(_I8, 64), [ir.Constant(_I8, i) for i in range(64)])
        undefined = ir.Constant(_BYTES, ir.Undefined)
        first = builder.insert_element(undefined, builder.trunc(args[1], _I8), ir.Constant(_I32, 0))
        zeros = ir.Constant(ir.VectorType(_I32, 64), [ir.Constant(_I32, 0)] * 64)
        mask = builder.icmp_unsigned("<", lane, builder.shuffle_vector(first, undefined, zeros))
        pointer = builder.inttoptr(args[0], _BYTES.as_pointer())
        loaded = [pointer, ir.Constant(_I32, 1), mask, ir.Constant(_BYTES, None)]
        return builder.bitcast(_call(builder, "llvm.masked.load.v64i8.p0", _BYTES, loaded), _WORDS)

    return i32x16(types.intp, types.intp), codegen


@intrinsic
def low_nibbles(typingctx, vector):
    """The low nibble of every byte."""

    def codegen(context, builder, signature, args):
        return builder.and_(args[0], _words(*[0x0F0F0F0F] * 16))

    return i32x16(i32x16), codegen


@intrinsic
def high_nibbles(typingctx, vector):
    """The high nibble of every byte, moved down."""

    def codegen(context, builder, signature, args):
        return builder.and_(builder.lshr(args[0], _words(*[4] * 16)), _words(*[0x0F0F0F0F] * 16))

    return i32x16(i32x16), codegen


@intrinsic
def look_up(typingctx, table, index):
    """Bytes of `table` by the low four bits of each byte of `index`, within each quarter of the register."""

    def codegen(context, builder, signature, args):
        return _shuffle_bytes(builder, *args)

    return i32x16(i32x16, i32x16), codegen


@intrinsic
def dot_bytes(typingctx, total, unsigned, signed):
    """total + Σ of four products of unsigned and signed bytes, in each int32 lane (VPDPBUSD: no saturation)."""

    def codegen(context, builder, signature, args):
        total, unsigned, signed = args
        operands = [total, builder.bitcast(unsigned, _BYTES), builder.bitcast(signed, _BYTES)]
        return _call(builder, "llvm.x86.avx512.vpdpbusd.512", _WORDS, operands)

    return i32x16(i32x16, i32x16, i32x16), codegen


@intrinsic
def load_word(typingctx, address):
    """The int32 at a byte address."""

    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], _I32.as_pointer()), align=1)

    return types.int32(types.intp), codegen


@intrinsic
def group_tables(typingctx, tables, scales, base, other):
    """The look-up table of four 32-groups, one in each quarter.

    `tables` holds four tables, for exponents base .. base + 3; `scales` four scale bytes in an int32. A group whose
    exponent is outside gets `other`, a byte repeated in an int32.
    """

    def codegen(context, builder, signature, args):
        tables, scales, base, other = args
        # byte g of the word into every int32 of quarter g, zero-extended (an index with the top bit set gives zero)
        pattern = _words(*[0x80808000 + quarter for quarter in range(4) for _ in range(4)])
        spread = _shuffle_bytes(builder, _splat(builder, scales), pattern)
        shift = builder.sub(spread, _splat(builder, base))
        inside = builder.icmp_unsigned("<", shift, _words(*[4] * 16))
        index = builder.add(builder.shl(shift, _words(*[2] * 16)), _words(*[0, 1, 2, 3] * 4))
        chosen = _call(builder, "llvm.x86.avx512.permvar.si.512", _WORDS, [tables, index])
        return builder.select(inside, chosen, _splat(builder, other))

    return i32x16(i32x16, types.int32, types.int32, types.int32), codegen


@intrinsic
def isum(typingctx, vector):
    """Sum of the lanes; the caller knows that it fits an int32."""

    def codegen(context, builder, signature, args):
        return _call(builder, "llvm.vector.reduce.add.v16i32", _I32, args)

    return types.int32(i32x16), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at a byte address; any address is allowed."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I8.as_pointer())
        flags = [ir.Constant(_I32, value) for value in (0, 3, 1)]  # read, keep in all caches, data
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *flags])
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def least_and_most(typingctx, a, b):
    """The smallest and the largest byte of two vectors, unsigned, as one int32: largest * 256 + smallest."""

    def codegen(context, builder, signature, args):
        a, b = (builder.bitcast(arg, _BYTES) for arg in args)
        least = _call(builder, "llvm.umin.v64i8", _BYTES, [a, b])
        most = _call(builder, "llvm.umax.v64i8", _BYTES, [a, b])
        low = _call(builder, "llvm.vector.reduce.umin.v64i8", _I8, [least])
        high = _call(builder, "llvm.vector.reduce.umax.v64i8", _I8, [most])
        shifted = builder.shl(builder.zext(high, _I32), ir.Constant(_I32, 8))
        return builder.or_(shifted, builder.zext(low, _I32))

    return types.int32(i32x16, i32x16), codegen
