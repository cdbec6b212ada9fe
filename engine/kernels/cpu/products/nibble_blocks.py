"""Activations as the products of `nibbles.py` read them."""

from llvmlite import ir
from numba import types

from engine.kernels.cpu.compilation.emitter import (
    BYTES,
    FLOAT,
    FLOATS,
    INT32,
    INT64,
    INTS,
    Builder,
    CodeContext,
    Emitter,
    Intrinsic,
    NumbaType,
    Signature,
    TypingContext,
    Value,
    Values,
    emitted,
    largest_of,
)
from engine.kernels.cpu.machine import BLOCK_HEAD_BYTES, FLOAT_BYTES, INT8_LEVELS, LANES, ZERO_BITS, knows_vnni


@emitted
def quantise_block(
    typing: TypingContext, values: NumbaType, num_vectors: NumbaType, num_missing: NumbaType, out: NumbaType
) -> Intrinsic:
    """Write 16 * num_vectors fp32 numbers as a block of a group, whose scale is the largest magnitude / 127, and
    16 * num_missing zeros behind them.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        values, num_vectors, num_missing, out = args
        values_at, out_at = emit.pointer(values), emit.pointer(out)
        largest = largest_of(emit, values, num_vectors)
        factor = emit.splat(builder.fdiv(FLOAT(INT8_LEVELS), largest, flags=("nsz",)))

        def put(levels: Value, number: Value) -> None:
            at = builder.add(builder.mul(number, INT64(LANES)), INT64(BLOCK_HEAD_BYTES))
            emit.store(builder.trunc(levels, BYTES), emit.at(out_at, at), 1)

        with emit.loop(num_vectors, [ir.Constant(INTS, [0] * LANES)]) as loop:
            read = emit.load(emit.vector_at(values_at, loop.index), FLOATS)
            levels = emit.rounded(builder.fmul(read, factor))
            put(levels, loop.index)
            loop.next.append(builder.sub(loop.carried[0], levels))
        emit.store(builder.fdiv(largest, FLOAT(INT8_LEVELS), flags=("nsz",)), out_at)
        shift = emit.call("llvm.vector.reduce.add.v16i32", INT32, loop.next[0])
        shift = builder.shl(shift, INT32(ZERO_BITS)) if knows_vnni() else shift
        emit.store(shift, emit.at(out_at, FLOAT_BYTES))
        with builder.if_then(builder.icmp_signed(">", num_missing, INT64(0))), emit.loop(num_missing, []) as missing:
            put(ir.Constant(INTS, [0] * LANES), builder.add(num_vectors, missing.index))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate
