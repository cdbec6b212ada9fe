"""Queries and softmax weights as decode attention multiplies KV with them: for KV in int8 they are rounded to 16 bits.

VNNI multiplies such a number as two bytes ("limbs"), other CPUs as it is: then the sums of MAX_SHORTS numbers fit into
int32. The error is 1/32512 of a query's largest number, and 1/65535 (1/32767 without VNNI) of a segment's largest
weight. Arguments are as in `vectors.py`.
"""

import numpy as np
from llvmlite import ir
from numba import types

from engine.kernels.cpu.arguments import Address, AttentionMemory, Element, HeadShape, Matrix
from engine.kernels.cpu.attention.kv_segments import ALL_BYTES, scales_at
from engine.kernels.cpu.compilation.emitter import (
    BYTES,
    FLOAT,
    FLOATS,
    INT32,
    INT64,
    INTS,
    TINY_BITS,
    Builder,
    CodeContext,
    Emitter,
    Intrinsic,
    NumbaType,
    Signature,
    TypingContext,
    Value,
    Values,
    constant,
    emitted,
    largest_of,
)
from engine.kernels.cpu.compilation.parts import select_by_dtype
from engine.kernels.cpu.machine import (
    FACTOR_AT,
    FLOAT_BYTES,
    LANES,
    LIMBS_TAIL_BYTES,
    QUAD,
    SIGN_BITS,
    knows_vnni,
)
from engine.kernels.cpu.vectors import largest_magnitude, quantise_vectors, shorts_of, write_float

_INTP = types.intp
_QUERY_LEVELS = 127.0 * 256
_LIMB_LEVELS, _SHORT_LEVELS = 65535.0, 32767.0
_HIGH_THEN_LOW = [QUAD * lane + byte for byte in (1, 0) for lane in range(LANES)]


def prepare_queries(
    query: Address, num_rows: int, shape: HeadShape, memory: AttentionMemory, element: Element
) -> Matrix:
    """Bring fp32 rows [num_rows, head_dim] into the form that `score_keys` reads.

    Factors of the rows' scores that are not 1 are written to memory.factors. The result may be in memory.prepared.
    """
    raise NotImplementedError


def _plain_queries(
    query: Address, num_rows: int, shape: HeadShape, memory: AttentionMemory, element: Element
) -> Matrix:
    return Matrix(query, shape.head_dim * FLOAT_BYTES)


def prepare_weights(weights: Matrix, num_rows: int, values: Address, num_vectors: int, element: Element) -> None:
    """Bring the softmax weights [num_rows, 16] of a head of a segment into the form that `add_values` reads, where they
    are. values: the head's, whose rows have `num_vectors` vectors.
    """
    raise NotImplementedError


def _round_weights(weights: Matrix, num_rows: int, values: Address, num_vectors: int, element: Element) -> None:
    round_weights(weights, num_rows, values, num_vectors)


def _leave_weights(weights: Matrix, num_rows: int, values: Address, num_vectors: int, element: Element) -> None:
    pass


def _split_queries(
    query: Address, num_rows: int, shape: HeadShape, memory: AttentionMemory, element: Element
) -> Matrix:
    """`prepare_queries` with VNNI."""
    step = 2 * shape.head_dim + LIMBS_TAIL_BYTES
    for row in range(num_rows):
        at = query + row * shape.head_dim * FLOAT_BYTES
        split_query(at, shape.head_dim // LANES, memory.prepared + row * step, memory.factors + row * FLOAT_BYTES)
    return Matrix(memory.prepared, step)


def _short_queries(
    query: Address, num_rows: int, shape: HeadShape, memory: AttentionMemory, element: Element
) -> Matrix:
    """`prepare_queries` without VNNI."""
    num_vectors, step = shape.head_dim // LANES, 2 * shape.head_dim
    for row in range(num_rows):
        at = query + row * shape.head_dim * FLOAT_BYTES
        largest, out = largest_magnitude(at, num_vectors), memory.prepared + row * step
        quantise_vectors(at, num_vectors, np.float32(_QUERY_LEVELS) / largest, out, np.uint16(0))
        write_float(memory.factors + row * FLOAT_BYTES, largest / np.float32(_QUERY_LEVELS))
    return Matrix(memory.prepared, step)


@emitted
def split_query(
    typing: TypingContext, values: NumbaType, num_vectors: NumbaType, out: NumbaType, factor: NumbaType
) -> Intrinsic:
    """Split a query of fp32 values. The factor of its scores is written to the address `factor`.

    out: the high bytes, the low bytes, then for each an int32 that cancels what the keys' zero point adds to the sums.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        values_at, out_at = emit.pointer(args[0]), emit.pointer(args[2])
        largest, dim = largest_of(emit, args[0], args[1]), builder.mul(args[1], INT64(LANES))
        factor = emit.splat(builder.fdiv(FLOAT(_QUERY_LEVELS), largest))
        with emit.loop(args[1], [constant(INTS, 0)] * 2) as loop:
            read = emit.load(emit.vector_at(values_at, loop.index), FLOATS)
            levels = emit.rounded(builder.fmul(read, factor))
            high = builder.ashr(builder.add(levels, constant(INTS, 128)), constant(INTS, 8))
            low = builder.sub(levels, builder.shl(high, constant(INTS, 8)))
            at = emit.at(out_at, builder.mul(loop.index, INT64(LANES)))
            for i, limb in enumerate((high, low)):
                emit.store(builder.trunc(limb, BYTES), emit.at(at, builder.mul(dim, INT64(i))), 1)
                loop.next.append(builder.add(loop.carried[i], limb))
        for i, totals in enumerate(loop.next):
            total = emit.call("llvm.vector.reduce.add.v16i32", INT32, totals)
            added = builder.mul(total, INT32(-SIGN_BITS))
            emit.store(added, emit.at(out_at, builder.add(builder.mul(dim, INT64(2)), INT64(4 * i))))
        emit.store(builder.fdiv(largest, FLOAT(_QUERY_LEVELS)), emit.pointer(args[3]))
        return context.get_dummy_value()

    return types.void(*[_INTP] * 4), generate


@emitted
def round_weights(
    typing: TypingContext, weights: NumbaType, num_rows: NumbaType, segment: NumbaType, num_vectors: NumbaType
) -> Intrinsic:
    """Overwrite the 16 weights >= 0 of each row with whole numbers and their factor, which `add_bytes` reads: they are
    weights times the scales of a segment's values.

    weights: a Matrix; num_rows: at least 1. The numbers are high bytes and low bytes, or, without VNNI, 16 bits in
    SHORTS_ORDER.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        first_at, step = emit.matrix(args[0])
        scales = emit.load(scales_at(emit, emit.pointer(args[2]), args[3]), FLOATS)
        with emit.loop(args[1], []) as loop:
            _round_row(emit, emit.at(first_at, builder.mul(step, loop.index)), scales)
        return context.get_dummy_value()

    return types.void(weights, *[_INTP] * 3), generate


def _round_row(emit: Emitter, at: Value, scales: Value) -> None:
    builder = emit.builder
    most = _LIMB_LEVELS if knows_vnni() else _SHORT_LEVELS
    weights, nothing = emit.load(at, FLOATS), constant(INTS, 0)
    # Not every weight of 0 times its scale: that of a hidden token, such as a draft, may be NaN.
    is_hidden = builder.icmp_signed("==", builder.bitcast(weights, INTS), nothing)
    scaled = builder.select(is_hidden, builder.bitcast(nothing, FLOATS), builder.fmul(weights, scales))
    bits = builder.and_(builder.bitcast(scaled, INTS), constant(INTS, 0x7FFFFFFF))  # as in `largest_of`
    bits = emit.call("llvm.smax.v16i32", INTS, bits, constant(INTS, TINY_BITS))
    largest, zeros = _largest_of_four(emit, bits), ir.Constant(INTS, [0] * LANES)
    # Without flags LLVM might estimate the quotient.
    factors = builder.fdiv(ir.Constant(largest.type, [most] * QUAD), largest, flags=("nsz",))
    levels = emit.rounded(builder.fmul(scaled, builder.shuffle_vector(factors, factors, zeros)))
    if knows_vnni():
        octets = builder.bitcast(levels, ALL_BYTES)
        limbs = builder.shuffle_vector(octets, octets, ir.Constant(ir.VectorType(INT32, 2 * LANES), _HIGH_THEN_LOW))
        emit.store(limbs, at, 1)
    else:
        emit.store(shorts_of(emit, levels), at, 1)
    factor = builder.fdiv(builder.extract_element(largest, INT32(0)), FLOAT(most))
    emit.store(factor, emit.at(at, FACTOR_AT))


def _largest_of_four(emit: Emitter, bits: Value) -> Value:
    """The largest of 16 positive fp32 numbers, in four lanes. LLVM's own reduction ends in another kind of register,
    and the way there and back takes as long as the rest.
    """
    builder = emit.builder
    for distance in (8, 4, 2, 1):
        kind = ir.VectorType(INT32, max(QUAD, distance))
        pairs = ([lane ^ there for lane in range(kind.count)] for there in (0, distance))
        parts = [builder.shuffle_vector(bits, bits, ir.Constant(kind, lanes)) for lanes in pairs]
        bits = emit.call(f"llvm.smax.v{kind.count}i32", kind, *parts)
    return builder.bitcast(bits, ir.VectorType(FLOAT, QUAD))


select_by_dtype(prepare_queries, {types.int8: _split_queries if knows_vnni() else _short_queries}, _plain_queries)
select_by_dtype(prepare_weights, {types.int8: _round_weights}, _leave_weights)
