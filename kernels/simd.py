"""Vectors of sixteen float32 as numba values, and the few LLVM operations that kernels need to fix their arithmetic.

A vector is sixteen lanes whatever the register width: LLVM splits it for AVX2, so a lane's operations, and with them
every bit of the result, are the same on every instruction set. Nothing here is contracted or reassociated: a
multiply-add is fused exactly where `fma` is written. Addresses are plain integers (`array.ctypes.data`): the caller
holds the array and has checked shapes.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_VI16, _VI32, _VF32 = (ir.VectorType(element, LANES) for element in (_I16, _I32, _F32))


class Float32x16(types.Type):
    """Sixteen float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


f32x16 = Float32x16()


@register_model(Float32x16)
class _Float32x16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _VF32)


def _call(builder, name, result, args):
    """Call an LLVM intrinsic, declaring it in the module when it is new there."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def _pointer(builder, address, element):
    return builder.inttoptr(address, element.as_pointer())


def _mask(builder, count):
    """Lanes below `count` as a vector of i1."""
    lanes = ir.Constant(_VI32, [ir.Constant(_I32, lane) for lane in range(LANES)])
    return builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(count, _I32), _VI32))


def _splat(builder, scalar, vector):
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(_VI32, [0] * LANES))


def _masked_load(builder, address, count, vector, name, align):
    pointer = _pointer(builder, address, vector)
    args = [pointer, ir.Constant(_I32, align), _mask(builder, count), ir.Constant(vector, None)]
    return _call(builder, f"llvm.masked.load.{name}.p0", vector, args)


def _widen_bf16(builder, raw):
    """bf16 is the upper half of a float32."""
    wide = builder.zext(raw, _VI32)
    return builder.bitcast(builder.shl(wide, ir.Constant(_VI32, [ir.Constant(_I32, 16)] * LANES)), _VF32)


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, rounded once (float32 scalars)."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def bits_to_f32(typingctx, bits):
    """The float32 that has these 32 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _F32)

    return types.float32(types.uint32), codegen


@intrinsic
def vzero(typingctx):
    """Sixteen zeros."""

    def codegen(context, builder, signature, args):
        return ir.Constant(_VF32, [ir.Constant(_F32, 0.0)] * LANES)

    return f32x16(), codegen


@intrinsic
def vsplat(typingctx, value):
    """One float32 in all lanes."""

    def codegen(context, builder, signature, args):
        return _splat(builder, args[0], _VF32)

    return f32x16(types.float32), codegen


@intrinsic
def vload(typingctx, address):
    """Sixteen float32 at a byte address."""

    def codegen(context, builder, signature, args):
        return builder.load(_pointer(builder, args[0], _VF32), align=4)

    return f32x16(types.intp), codegen


@intrinsic
def vload_tail(typingctx, address, count):
    """`count` < 16 float32 at a byte address, zeros behind them; nothing beyond is touched."""

    def codegen(context, builder, signature, args):
        return _masked_load(builder, args[0], args[1], _VF32, "v16f32", 4)

    return f32x16(types.intp, types.intp), codegen


@intrinsic
def vload_bf16(typingctx, address):
    """Sixteen bf16 at a byte address, widened."""

    def codegen(context, builder, signature, args):
        return _widen_bf16(builder, builder.load(_pointer(builder, args[0], _VI16), align=1))

    return f32x16(types.intp), codegen


@intrinsic
def vload_bf16_tail(typingctx, address, count):
    """`count` < 16 bf16 at a byte address, widened, zeros behind them; nothing beyond is touched."""

    def codegen(context, builder, signature, args):
        return _widen_bf16(builder, _masked_load(builder, args[0], args[1], _VI16, "v16i16", 1))

    return f32x16(types.intp, types.intp), codegen


@intrinsic
def vfma(typingctx, a, b, c):
    """a * b + c in every lane, rounded once."""

    def codegen(context, builder, signature, args):
        return _call(builder, "llvm.fma.v16f32", _VF32, args)

    return f32x16(f32x16, f32x16, f32x16), codegen


@intrinsic
def vmul(typingctx, a, b):
    """a * b in every lane."""
    return f32x16(f32x16, f32x16), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def vsub(typingctx, a, b):
    """a - b in every lane."""
    return f32x16(f32x16, f32x16), lambda context, builder, signature, args: builder.fsub(*args)


@intrinsic
def vstore(typingctx, address, vector):
    """Write sixteen float32 to a byte address."""

    def codegen(context, builder, signature, args):
        builder.store(args[1], _pointer(builder, args[0], _VF32), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, f32x16), codegen


@intrinsic
def vstore_tail(typingctx, address, vector, count):
    """Write the first `count` < 16 lanes to a byte address."""

    def codegen(context, builder, signature, args):
        address, vector, count = args
        stored = [vector, _pointer(builder, address, _VF32), ir.Constant(_I32, 4), _mask(builder, count)]
        _call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), stored)
        return context.get_dummy_value()

    return types.void(types.intp, f32x16, types.intp), codegen


@intrinsic
def vsum(typingctx, vector):
    """Sum of the lanes by a fixed tree: halves 8 + 8, then 4 + 4, 2 + 2, 1 + 1."""

    def codegen(context, builder, signature, args):
        value, width = args[0], LANES
        while width > 1:
            width //= 2
            undefined = ir.Constant(value.type, ir.Undefined)
            index = ir.VectorType(_I32, width)
            low = builder.shuffle_vector(value, undefined, ir.Constant(index, list(range(width))))
            high = builder.shuffle_vector(value, undefined, ir.Constant(index, list(range(width, 2 * width))))
            value = builder.fadd(low, high)
        return builder.extract_element(value, ir.Constant(_I32, 0))

    return types.float32(f32x16), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at a byte address; any address is allowed."""

    def codegen(context, builder, signature, args):
        flags = [ir.Constant(_I32, value) for value in (0, 3, 1)]  # read, keep in all caches, data
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *flags])
        return context.get_dummy_value()

    return types.void(types.intp), codegen
