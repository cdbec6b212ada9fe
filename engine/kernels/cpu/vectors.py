"""Vector loops over rows of fp32 numbers, and conversions between fp32 and the cache's rows.

A row of the cache is one head of one token: fp32, or fp16 as uint16, because numba has no fp16 on CPU.
`kv_segments.py` has the loops for int8. `element` is any element of the cache; only its dtype matters. A row has
16 * num_vectors numbers.

Arguments are addresses unless the docstring says otherwise, and steps count bytes. Bounds are not checked.
"""

import math

from llvmlite import ir
from numba import types

from engine.kernels.cpu.compilation.emitter import (
    BYTES,
    FLOAT,
    FLOATS,
    INT32,
    INT64,
    INTS,
    SHORTS,
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
from engine.kernels.cpu.machine import (
    CACHE_LINE_BYTES,
    LANES,
    LOG2_E,
    QUAD,
    SHORTS_ORDER,
    VECTOR_BYTES,
    ZERO_POINT,
)

_INTP = types.intp
INFINITY_BITS = 0x7F800000


@emitted
def address(typing: TypingContext, array: NumbaType) -> Intrinsic:
    """The address of an array's first element."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        return builder.ptrtoint(Emitter(context, builder).array(signature.args[0], args[0]), INT64)

    return types.intp(array), generate


@emitted
def read_float(typing: TypingContext, at: NumbaType) -> Intrinsic:
    """The fp32 number at an address."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        return emit.load(emit.pointer(args[0]), FLOAT)

    return types.float32(_INTP), generate


@emitted
def write_float(typing: TypingContext, at: NumbaType, value: NumbaType) -> Intrinsic:
    """Write an fp32 number to an address."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        emit.store(args[1], emit.pointer(args[0]))
        return context.get_dummy_value()

    return types.void(_INTP, types.float32), generate


@emitted
def read_int64(typing: TypingContext, at: NumbaType) -> Intrinsic:
    """The int64 at an address."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        return emit.load(emit.pointer(args[0]), INT64, 8)

    return types.int64(_INTP), generate


@emitted
def fill_row(typing: TypingContext, out: NumbaType, num_vectors: NumbaType, value: NumbaType) -> Intrinsic:
    """out = value, in fp32."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        at, value = emit.pointer(args[0]), emit.splat(args[2])
        with emit.loop(args[1], []) as loop:
            emit.store(value, emit.vector_at(at, loop.index))
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, types.float32), generate


@emitted
def largest_magnitude(typing: TypingContext, values: NumbaType, num_vectors: NumbaType) -> Intrinsic:
    """The largest absolute value of a row, at least TINY; NaN if the row has one."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        return largest_of(Emitter(context, builder), args[0], args[1])

    return types.float32(_INTP, _INTP), generate


def shorts_of(emit: Emitter, lanes: Value) -> Value:
    """16 int32 as int16, each four of them in SHORTS_ORDER."""
    order = ir.Constant(INTS, [first + place for first in range(0, LANES, QUAD) for place in SHORTS_ORDER])
    return emit.builder.trunc(emit.builder.shuffle_vector(lanes, lanes, order), SHORTS)


@emitted
def quantise_vectors(
    typing: TypingContext,
    values: NumbaType,
    num_vectors: NumbaType,
    factor: NumbaType,
    out: NumbaType,
    element: NumbaType,
) -> Intrinsic:
    """Write a row as round(value * factor): unsigned bytes, with ZERO_POINT added, or, if `element` is of two bytes,
    signed numbers in SHORTS_ORDER.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        values_at, factor, out_at = emit.pointer(args[0]), emit.splat(args[2]), emit.pointer(args[3])
        with emit.loop(args[1], []) as loop:
            read = emit.load(emit.vector_at(values_at, loop.index), FLOATS)
            levels = emit.rounded(builder.fmul(read, factor))
            if element == types.uint8:
                stored = builder.trunc(builder.add(levels, constant(INTS, ZERO_POINT)), BYTES)
            else:
                stored = shorts_of(emit, levels)
            num_bytes = LANES * element.bitwidth // 8
            emit.store(stored, emit.at(out_at, builder.mul(loop.index, INT64(num_bytes))), 1)
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, types.float32, _INTP, element), generate


@emitted
def weigh_row(
    typing: TypingContext, values: NumbaType, weights: NumbaType, num_vectors: NumbaType, out: NumbaType
) -> Intrinsic:
    """out = values * weights in fp32; returns the sum of the values' squares."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        values_at, weights_at, out_at = (emit.pointer(args[i]) for i in (0, 1, 3))
        with emit.loop(args[2], [constant(FLOATS, 0.0)]) as loop:
            at = builder.mul(loop.index, INT64(VECTOR_BYTES))
            read, weight = (emit.load(emit.at(row, at), FLOATS) for row in (values_at, weights_at))
            emit.store(builder.fmul(read, weight), emit.at(out_at, at))
            loop.next.append(emit.multiply_add(read, read, loop.carried[0]))
        return emit.call("llvm.vector.reduce.fadd.v16f32", FLOAT, FLOAT(0.0), loop.next[0])

    return types.float32(*[_INTP] * 4), generate


@emitted
def rotate_halves(
    typing: TypingContext,
    heads: NumbaType,
    num_heads: NumbaType,
    cos: NumbaType,
    sin: NumbaType,
    num_vectors: NumbaType,
) -> Intrinsic:
    """Apply rotary positions to contiguous heads in place. Half a head has `num_vectors` vectors; the first half of
    `sin` is negated. See engine/models/rope.py.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        heads_at, *factors_at = (emit.pointer(args[i]) for i in (0, 2, 3))
        half = builder.mul(args[4], INT64(VECTOR_BYTES))
        with emit.loop(args[4], []) as column:
            first = builder.mul(column.index, INT64(VECTOR_BYTES))
            halves = (first, builder.add(first, half))
            cos, sin = ([emit.load(emit.at(factors, at), FLOATS) for at in halves] for factors in factors_at)
            with emit.loop(args[1], []) as head:
                at = emit.at(heads_at, builder.mul(head.index, builder.shl(half, INT64(1))))
                low, high = (emit.load(emit.at(at, offset), FLOATS) for offset in halves)
                for i, (number, paired) in enumerate(((low, high), (high, low))):
                    turned = emit.multiply_add(number, cos[i], builder.fmul(paired, sin[i]))
                    emit.store(turned, emit.at(at, halves[i]))
        return context.get_dummy_value()

    return types.void(*[_INTP] * 5), generate


@emitted
def to_bf16(typing: TypingContext, values: NumbaType, num_vectors: NumbaType, out: NumbaType) -> Intrinsic:
    """Round fp32 values to bf16, ties to even."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        values_at, out_at = emit.pointer(args[0]), emit.pointer(args[2])
        with emit.loop(args[1], []) as loop:
            read = emit.load(emit.vector_at(values_at, loop.index), FLOATS)
            half = emit.bf16(read)
            emit.store(half, emit.at(out_at, builder.mul(loop.index, INT64(VECTOR_BYTES // 2))), 2)
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, _INTP), generate


@emitted
def pair_rows(
    typing: TypingContext, low: NumbaType, high: NumbaType, num_vectors: NumbaType, out: NumbaType, out_step: NumbaType
) -> Intrinsic:
    """Interleave two rows of 16-bit numbers. Vectors of 16 pairs are stored `out_step` bytes apart."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        low_at, high_at, out_at = (emit.pointer(args[i]) for i in (0, 1, 3))
        mask = ir.Constant(ir.VectorType(INT32, 2 * LANES), [lane for i in range(LANES) for lane in (i, LANES + i)])
        with emit.loop(args[2], []) as loop:
            at = builder.mul(loop.index, INT64(VECTOR_BYTES // 2))
            rows = [emit.load(emit.at(row, at), SHORTS, 2) for row in (low_at, high_at)]
            pairs = builder.shuffle_vector(*rows, mask)
            emit.store(pairs, emit.at(out_at, builder.mul(loop.index, args[4])), 2)
        return context.get_dummy_value()

    return types.void(*[_INTP] * 5), generate


@emitted
def mix_rows(
    typing: TypingContext,
    values: NumbaType,
    num_vectors: NumbaType,
    factor: NumbaType,
    out_factor: NumbaType,
    out: NumbaType,
) -> Intrinsic:
    """out = out * out_factor + values * factor in fp32."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        values_at, out_at = emit.pointer(args[0]), emit.pointer(args[4])
        factor, out_factor = emit.splat(args[2]), emit.splat(args[3])
        with emit.loop(args[1], []) as loop:
            at = builder.mul(loop.index, INT64(VECTOR_BYTES))
            read, target = emit.load(emit.at(values_at, at), FLOATS), emit.at(out_at, at)
            kept = builder.fmul(emit.load(target, FLOATS), out_factor)
            emit.store(emit.multiply_add(read, factor, kept), target)
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, types.float32, types.float32, _INTP), generate


@emitted
def scale_row(
    typing: TypingContext, values: NumbaType, num_vectors: NumbaType, factor: NumbaType, out: NumbaType
) -> Intrinsic:
    """out = values * factor in fp32; `out` may be `values`."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        values_at, factor, out_at = emit.pointer(args[0]), emit.splat(args[2]), emit.pointer(args[3])
        with emit.loop(args[1], []) as loop:
            at = builder.mul(loop.index, INT64(VECTOR_BYTES))
            emit.store(builder.fmul(emit.load(emit.at(values_at, at), FLOATS), factor), emit.at(out_at, at))
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, types.float32, _INTP), generate


@emitted
def prefetch(typing: TypingContext, at: NumbaType, num_bytes: NumbaType) -> Intrinsic:
    """Prefetch memory into the L2 cache. The address may be invalid."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        at = emit.pointer(args[0])
        with emit.loop(builder.udiv(args[1], INT64(CACHE_LINE_BYTES)), []) as loop:
            emit.prefetch(emit.at(at, builder.mul(loop.index, INT64(CACHE_LINE_BYTES))), to_l2=True)
        return context.get_dummy_value()

    return types.void(_INTP, _INTP), generate


def is_nan(emit: Emitter, values: Value) -> Value:
    """Which numbers of an fp32 vector are NaN, by their bits: comparisons of floats are compiled as if none were."""
    magnitudes = emit.builder.and_(emit.builder.bitcast(values, INTS), constant(INTS, 0x7FFFFFFF))
    return emit.builder.icmp_unsigned(">", magnitudes, constant(INTS, INFINITY_BITS))


@emitted
def index_of_largest(typing: TypingContext, values: NumbaType, num_vectors: NumbaType) -> Intrinsic:
    """Index of the largest value, the first of equal ones. NaNs count as smallest. num_vectors must be at least 1."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        at, lanes = emit.pointer(args[0]), ir.Constant(INTS, list(range(LANES)))
        with emit.loop(args[1], [constant(FLOATS, -math.inf), constant(INTS, 0)]) as loop:
            read = emit.load(emit.vector_at(at, loop.index), FLOATS)
            indices = builder.add(emit.splat(builder.trunc(builder.mul(loop.index, INT64(LANES)), INT32)), lanes)
            is_larger = builder.fcmp_ordered(">", read, loop.carried[0])
            loop.next.append(builder.select(is_larger, read, loop.carried[0]))
            loop.next.append(builder.select(is_larger, indices, loop.carried[1]))
        values, indices = loop.next
        largest = emit.splat(emit.call("llvm.vector.reduce.fmax.v16f32", FLOAT, values))
        is_largest = builder.fcmp_ordered("==", values, largest)
        indices = builder.select(is_largest, indices, constant(INTS, 2**31 - 1))
        return builder.zext(emit.call("llvm.vector.reduce.umin.v16i32", INT32, indices), INT64)

    return types.intp(_INTP, _INTP), generate


@emitted
def sum_of_exponents(typing: TypingContext, values: NumbaType, num_vectors: NumbaType, largest: NumbaType) -> Intrinsic:
    """The sum of e^(value - largest), fp32."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        at, largest = emit.pointer(args[0]), emit.splat(args[2])
        with emit.loop(args[1], [constant(FLOATS, 0.0)]) as total:
            read = emit.load(emit.vector_at(at, total.index), FLOATS)
            power = emit.power_of_two(builder.fmul(builder.fsub(read, largest), constant(FLOATS, LOG2_E)))
            total.next.append(builder.fadd(total.carried[0], power))
        return emit.call("llvm.vector.reduce.fadd.v16f32", FLOAT, FLOAT(0.0), total.next[0])

    return types.float32(_INTP, _INTP, types.float32), generate
