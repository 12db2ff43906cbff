"""Vector registers of bytes as numba values, and the operations that every width has.

The functions ending in `_operations` make numba intrinsics for one width; `kernels.vnni` and `kernels.avx2` add what
differs. Addresses are plain integers and need no alignment. All arithmetic is on integers, within ranges that the
caller keeps: nothing rounds or saturates.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


class Register(types.Type):
    """`n_bytes` bytes, or a quarter as many int32 lanes. `shuffle` names LLVM's byte look-up within sixteen bytes."""

    def __init__(self, n_bytes: int, shuffle: str) -> None:
        self.n_bytes, self.lanes, self.shuffle = n_bytes, n_bytes // 4, shuffle
        self.bytes = ir.VectorType(I8, n_bytes)
        self.words = ir.VectorType(I32, self.lanes)
        super().__init__(name=f"register{8 * n_bytes}")

    def constant(self, values):
        """A constant of int32 lanes."""
        return ir.Constant(self.words, [ir.Constant(I32, value) for value in values])

    def repeat(self, value):
        """A constant with the same int32 in every lane."""
        return self.constant([value] * self.lanes)

    def splat(self, builder, scalar):
        """An int32 value in every lane."""
        undefined = ir.Constant(self.words, ir.Undefined)
        first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return builder.shuffle_vector(first, undefined, self.repeat(0))

    def as_bytes(self, builder, *vectors):
        """The same registers as vectors of bytes."""
        return [builder.bitcast(vector, self.bytes) for vector in vectors]

    def shuffle_bytes(self, builder, table, index):
        """Bytes of `table` by `index`, within each sixteen; an index with the top bit set gives zero."""
        return builder.bitcast(
            call(builder, self.shuffle, self.bytes, self.as_bytes(builder, table, index)), self.words
        )

    def spread_scales(self, builder, scales):
        """Byte g of an int32 in every lane of the g-th sixteen bytes."""
        groups = range(self.lanes // 4)
        pattern = self.constant([0x80808000 + group for group in groups for _ in range(4)])
        return self.shuffle_bytes(builder, self.splat(builder, scales), pattern)


@register_model(Register)
class _RegisterModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.words)


def call(builder, name, result, args):
    """Call an LLVM intrinsic, declaring it in the module when it is new there."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def load_as(builder, address, element):
    """Load a value of an LLVM type from a byte address of any alignment."""
    return builder.load(builder.inttoptr(address, element.as_pointer()), align=1)


def memory_operations(register):
    """(zero, load): a register of zeros; the bytes at an address."""

    @intrinsic
    def zero(typingctx):
        return register(), lambda context, builder, signature, args: register.repeat(0)

    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            return load_as(builder, args[0], register.words)

        return register(types.intp), codegen

    return zero, load


def nibble_operations(register):
    """(low_nibbles, high_nibbles, look_up): of every byte; bytes of a table by bytes 0..15, within each sixteen."""
    mask = register.repeat(0x0F0F0F0F)

    @intrinsic
    def low_nibbles(typingctx, vector):
        return register(register), lambda context, builder, signature, args: builder.and_(args[0], mask)

    @intrinsic
    def high_nibbles(typingctx, vector):
        def codegen(context, builder, signature, args):
            return builder.and_(builder.lshr(args[0], register.repeat(4)), mask)

        return register(register), codegen

    @intrinsic
    def look_up(typingctx, table, index):
        return register(register, register), lambda context, builder, signature, args: register.shuffle_bytes(
            builder, *args
        )

    return low_nibbles, high_nibbles, look_up


def reduction_operations(register):
    """(limb_sum, byte_min, byte_max, least_and_most).

    Σ over int32 lanes of a0 + 2^8 a1 + 2^16 a2, as int64; the smaller and the larger of each two unsigned bytes; the
    smallest byte of one register and the largest of another, as largest * 256 + smallest.
    """
    n_bytes, lanes = register.n_bytes, register.lanes

    @intrinsic
    def limb_sum(typingctx, a0, a1, a2):
        def codegen(context, builder, signature, args):
            wide = ir.VectorType(I64, lanes)
            total = builder.sext(args[0], wide)
            for shift, limb in ((8, args[1]), (16, args[2])):
                amount = ir.Constant(wide, [ir.Constant(I64, shift)] * lanes)
                total = builder.add(total, builder.shl(builder.sext(limb, wide), amount))
            return call(builder, f"llvm.vector.reduce.add.v{lanes}i64", I64, [total])

        return types.int64(register, register, register), codegen

    def two_bytes(name):
        @intrinsic
        def choose(typingctx, a, b):
            def codegen(context, builder, signature, args):
                chosen = call(builder, f"llvm.{name}.v{n_bytes}i8", register.bytes, register.as_bytes(builder, *args))
                return builder.bitcast(chosen, register.words)

            return register(register, register), codegen

        return choose

    @intrinsic
    def least_and_most(typingctx, a, b):
        def codegen(context, builder, signature, args):
            a, b = register.as_bytes(builder, *args)
            low = call(builder, f"llvm.vector.reduce.umin.v{n_bytes}i8", I8, [a])
            high = call(builder, f"llvm.vector.reduce.umax.v{n_bytes}i8", I8, [b])
            shifted = builder.shl(builder.zext(high, I32), ir.Constant(I32, 8))
            return builder.or_(shifted, builder.zext(low, I32))

        return types.int32(register, register), codegen

    return limb_sum, two_bytes("umin"), two_bytes("umax"), least_and_most
