"""A segment of the KV cache: the keys, or the values, of 16 tokens of a layer, in the layout of each dtype.

fp32 and fp16 segments are rows, [16 tokens][heads][head_dim]; fp16 is kept as uint16, because numba has no fp16 on CPU.
int8 segments are grouped by head and laid out as VNNI multiplies them: QUAD bytes of one sum in each lane. A head has
16 vectors of bytes for each 16 of head_dim, then the tokens' 16 scales in fp32. Keys: [head_dim / 4][16 tokens]
[4 dims]; the lane of a token sums its dot product. Values: [4][head_dim][4 tokens]; the lane of a dim sums its weighted
sum. Nothing is converted or folded on the way. Both layouts have `row_bytes` bytes for each head of a token. Rows that
are keys and values at once lie as values.

`element` is any element of the cache; its dtype selects the layout at compile time: compiled code calls the functions
without a body, and `select_by_dtype` replaces them. Arguments of vector loops are as in `vectors.py`; `segment` is an
address.
"""

import math
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from engine.kernels.cpu.arguments import Address, Element, HeadShape
from engine.kernels.cpu.compilation.emitter import (
    BYTES,
    FLOAT,
    FLOATS,
    HALVES,
    INT8,
    INT32,
    INT64,
    INTS,
    VOID,
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
    FLOAT_BYTES,
    INT8_LEVELS,
    KEYS,
    LANES,
    QUAD,
    VECTOR_BYTES,
    knows_avx512,
)

_MINUS_ZERO = np.float32(-0.0)
"""Leaves every number that it is added to as it is: 0 would make 0 of -0."""
_TOO_LARGE_BITS = 0x477FF000
"""The least number that becomes infinity in fp16, 65,520, in fp32."""
_QUADS = ir.VectorType(INT32, LANES // QUAD)
ALL_BYTES = ir.VectorType(INT8, LANES * QUAD)
_INTP = types.intp


def scales_at(emit: Emitter, segment: Value, num_vectors: Value) -> Value:
    """Pointer to a segment's 16 scales."""
    return emit.at(segment, emit.builder.mul(num_vectors, INT64(LANES * KEYS)))


def _store_scale(emit: Emitter, values: Value, num_vectors: Value, segment: Value, token: Value) -> Value:
    """Store the scale of a token's row; returns the factor that quantises its values. token: 0 to 15."""
    builder = emit.builder
    largest = largest_of(emit, values, num_vectors)
    at = emit.at(scales_at(emit, segment, num_vectors), builder.mul(token, INT64(FLOAT_BYTES)))
    emit.store(builder.fdiv(largest, FLOAT(INT8_LEVELS)), at)
    return emit.splat(builder.fdiv(FLOAT(INT8_LEVELS), largest))


@emitted
def write_key(
    typing: TypingContext, values: NumbaType, num_vectors: NumbaType, segment: NumbaType, token: NumbaType
) -> Intrinsic:
    """Quantise fp32 values to the key of a segment's token."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        values_at, segment_at = emit.pointer(args[0]), emit.pointer(args[2])
        factor = _store_scale(emit, args[0], args[1], segment_at, args[3])
        lane = emit.at(segment_at, builder.mul(args[3], INT64(QUAD)))
        with emit.loop(args[1], []) as loop:
            read = emit.load(emit.vector_at(values_at, loop.index), FLOATS)
            levels = builder.trunc(emit.rounded(builder.fmul(read, factor)), BYTES)
            groups = builder.bitcast(levels, _QUADS)
            for i in range(LANES // QUAD):
                index = builder.add(builder.mul(loop.index, INT64(LANES // QUAD)), INT64(i))
                emit.store(builder.extract_element(groups, INT32(i)), emit.vector_at(lane, index))
        return context.get_dummy_value()

    return types.void(*[_INTP] * 4), generate


@emitted
def write_value(
    typing: TypingContext, values: NumbaType, num_vectors: NumbaType, segment: NumbaType, token: NumbaType
) -> Intrinsic:
    """Quantise fp32 values to the value row of a segment's token, whose bytes lie between those of other tokens."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        values_at, segment_at = emit.pointer(args[0]), emit.pointer(args[2])
        factor = _store_scale(emit, args[0], args[1], segment_at, args[3])
        group, lane = builder.lshr(args[3], INT64(2)), builder.and_(args[3], INT64(QUAD - 1))
        group_at = emit.at(segment_at, builder.mul(group, builder.mul(args[1], INT64(VECTOR_BYTES))))
        bits = emit.splat(builder.trunc(builder.mul(lane, INT64(8)), INT32))
        token_bytes = builder.shl(INT64(0x1111111111111111), lane)
        mask = builder.bitcast(token_bytes, ir.VectorType(ir.IntType(1), LANES * QUAD))
        with emit.loop(args[1], []) as loop:
            read = emit.load(emit.vector_at(values_at, loop.index), FLOATS)
            levels = emit.rounded(builder.fmul(read, factor))
            at = emit.vector_at(group_at, loop.index)
            if knows_avx512():
                spread = builder.bitcast(builder.shl(levels, bits), ALL_BYTES)
                at = builder.bitcast(at, ALL_BYTES.as_pointer())
                emit.call("llvm.masked.store.v64i8.p0", VOID, spread, at, INT32(1), mask)
            else:
                _scatter(emit, levels, emit.at(at, lane))
        return context.get_dummy_value()

    return types.void(*[_INTP] * 4), generate


def _scatter(emit: Emitter, levels: Value, at: Value) -> None:
    """Store the low bytes of 16 lanes, four bytes apart. Bytes between them are not touched: others may write them."""
    low = emit.builder.trunc(levels, BYTES)
    for i in range(LANES):
        emit.store(emit.builder.extract_element(low, INT32(i)), emit.at(at, QUAD * i), 1)


def _fours(emit: Emitter, at: Value) -> list[Value]:
    """Four fp32 vectors: the signed bytes number 0, 1, 2 and 3 of 16 lanes."""
    builder, lanes = emit.builder, emit.load(at, INTS)
    shifted = [builder.shl(lanes, constant(INTS, 24 - 8 * i)) for i in range(QUAD)]
    return [builder.sitofp(builder.ashr(lane, constant(INTS, 24)), FLOATS) for lane in shifted]


@emitted
def read_byte_keys(typing: TypingContext, segment: NumbaType, num_vectors: NumbaType, out: NumbaType) -> Intrinsic:
    """Convert a segment's keys to fp32 [head_dim][16]."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        segment_at, out_at = emit.pointer(args[0]), emit.pointer(args[2])
        scales = emit.load(scales_at(emit, segment_at, args[1]), FLOATS)
        with emit.loop(builder.mul(args[1], INT64(QUAD)), []) as loop:
            target = emit.vector_at(out_at, builder.mul(loop.index, INT64(QUAD)))
            for i, numbers in enumerate(_fours(emit, emit.vector_at(segment_at, loop.index))):
                emit.store(builder.fmul(numbers, scales), emit.at(target, i * VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(*[_INTP] * 3), generate


@emitted
def read_byte_values(typing: TypingContext, segment: NumbaType, num_vectors: NumbaType, out: NumbaType) -> Intrinsic:
    """Convert a segment's value rows to fp32 [16][head_dim]."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        segment_at, out_at = emit.pointer(args[0]), emit.pointer(args[2])
        first_scale, row_bytes = scales_at(emit, segment_at, args[1]), builder.mul(args[1], INT64(VECTOR_BYTES))
        scales = [emit.splat(emit.load(emit.at(first_scale, FLOAT_BYTES * token), FLOAT)) for token in range(KEYS)]
        with emit.loop(args[1], []) as loop:
            for group in range(KEYS // QUAD):
                at = emit.at(emit.vector_at(segment_at, loop.index), builder.mul(row_bytes, INT64(group)))
                for token, numbers in enumerate(_fours(emit, at), QUAD * group):
                    target = emit.at(emit.vector_at(out_at, loop.index), builder.mul(row_bytes, INT64(token)))
                    emit.store(builder.fmul(numbers, scales[token]), target)
        return context.get_dummy_value()

    return types.void(*[_INTP] * 3), generate


@emitted
def transpose_byte_values(
    typing: TypingContext, segment: NumbaType, num_vectors: NumbaType, out: NumbaType
) -> Intrinsic:
    """Convert a segment's value rows to fp32 [head_dim][16]."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        segment_at, out_at = emit.pointer(args[0]), emit.pointer(args[2])
        row_bytes = builder.mul(args[1], INT64(VECTOR_BYTES))
        scales = emit.load(scales_at(emit, segment_at, args[1]), FLOATS)
        with emit.loop(args[1], []) as loop:
            rows: list[Value] = []
            for group in range(KEYS // QUAD):
                rows += _fours(
                    emit, emit.at(emit.vector_at(segment_at, loop.index), builder.mul(row_bytes, INT64(group)))
                )
            target = emit.at(out_at, builder.mul(loop.index, INT64(LANES * VECTOR_BYTES)))
            for i, lanes in enumerate(_transposed(builder, rows)):
                emit.store(builder.fmul(lanes, scales), emit.at(target, i * VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(*[_INTP] * 3), generate


@emitted
def read_rows(
    typing: TypingContext, rows: NumbaType, step: NumbaType, num_vectors: NumbaType, out: NumbaType, element: NumbaType
) -> Intrinsic:
    """Convert 16 rows of the cache to contiguous fp32 rows. `step`: bytes from row to row in the cache."""
    bits = element.bitwidth

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        rows_at, out_at = emit.pointer(args[0]), emit.pointer(args[3])
        rows = [emit.at(rows_at, builder.mul(args[1], INT64(key))) for key in range(KEYS)]
        out_step = builder.mul(args[2], INT64(VECTOR_BYTES))
        with emit.loop(args[2], []) as loop:
            column = builder.mul(loop.index, INT64(LANES * bits // 8))
            target = emit.vector_at(out_at, loop.index)
            for key, row in enumerate(rows):
                values = emit.floats(emit.at(row, column), element)
                emit.store(values, emit.at(target, builder.mul(out_step, INT64(key))))
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, _INTP, _INTP, element), generate


@emitted
def transpose_rows(
    typing: TypingContext, rows: NumbaType, step: NumbaType, num_vectors: NumbaType, out: NumbaType, element: NumbaType
) -> Intrinsic:
    """Convert 16 rows of the cache to fp32 [16 * num_vectors][16]. `step`: bytes from row to row in the cache."""
    bits = element.bitwidth

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        rows_at, out_at = emit.pointer(args[0]), emit.pointer(args[3])
        rows = [emit.at(rows_at, builder.mul(args[1], INT64(key))) for key in range(KEYS)]
        with emit.loop(args[2], []) as loop:
            column = builder.mul(loop.index, INT64(LANES * bits // 8))
            square = _transposed(builder, [emit.floats(emit.at(row, column), element) for row in rows])
            target = emit.at(out_at, builder.mul(loop.index, INT64(LANES * VECTOR_BYTES)))
            for i, lanes in enumerate(square):
                emit.store(lanes, emit.at(target, i * VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, _INTP, _INTP, element), generate


def _transposed(builder: Builder, rows: list[Value]) -> list[Value]:
    """The transposed square of 16 vectors: squares of half the size change places, then those within them."""
    size = LANES // 2
    while size:
        low = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
        high = [lane + size if not lane & size else LANES + lane for lane in range(LANES)]
        for i in (i for i in range(LANES) if not i & size):
            pair = rows[i], rows[i + size]
            rows[i], rows[i + size] = (builder.shuffle_vector(*pair, ir.Constant(INTS, lanes)) for lanes in (low, high))
        size //= 2
    return rows


@emitted
def misfit(typing: TypingContext, values: NumbaType, num_vectors: NumbaType, element: NumbaType) -> Intrinsic:
    """NaN if one of the fp32 values does not fit into rows of the cache, else _MINUS_ZERO."""
    bits = element.bitwidth

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        if bits == 32:
            return FLOAT(_MINUS_ZERO)
        highest = builder.bitcast(largest_of(Emitter(context, builder), args[0], args[1]), INT32)
        fits = builder.icmp_unsigned("<", highest, INT32(_TOO_LARGE_BITS))
        return builder.select(fits, FLOAT(_MINUS_ZERO), FLOAT(math.nan))

    return types.float32(_INTP, _INTP, element), generate


@emitted
def write_row(
    typing: TypingContext,
    values: NumbaType,
    num_vectors: NumbaType,
    row: NumbaType,
    addend: NumbaType,
    element: NumbaType,
) -> Intrinsic:
    """Convert fp32 values, plus an addend, to a row of the cache."""
    bits = element.bitwidth

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        values_at, row_at, addend = emit.pointer(args[0]), emit.pointer(args[2]), emit.splat(args[3])
        with emit.loop(args[1], []) as loop:
            read = emit.add_in_order(emit.load(emit.vector_at(values_at, loop.index), FLOATS), addend)
            if bits == 16:
                read = builder.fptrunc(read, HALVES)
            emit.store(read, emit.at(row_at, builder.mul(loop.index, INT64(LANES * bits // 8))), bits // 8)
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, _INTP, types.float32, element), generate


class HeadSegments(NamedTuple):
    """One head in a segment of keys and in the segment of values of the same tokens."""

    keys: Address
    values: Address


def head_of(segment: Address, head: int, shape: HeadShape, element: Element) -> Address:
    """The address of a head in a segment."""
    raise NotImplementedError


def _head_of_bytes(segment: Address, head: int, shape: HeadShape, element: Element) -> Address:
    return segment + head * KEYS * shape.row_bytes


def _head_of_rows(segment: Address, head: int, shape: HeadShape, element: Element) -> Address:
    return segment + head * shape.row_bytes


def write_head(
    key: Address, value: Address, segments: HeadSegments, token: int, shape: HeadShape, element: Element
) -> None:
    """Write the fp32 key and value of one head to token 0 to 15 of its segments."""
    raise NotImplementedError


def _write_bytes(
    key: Address, value: Address, segments: HeadSegments, token: int, shape: HeadShape, element: Element
) -> None:
    if shape.num_planes > 1:
        write_key(key, shape.head_dim // LANES, segments.keys, token)
    write_value(value, shape.head_dim // LANES, segments.values, token)


def _write_rows(
    key: Address, value: Address, segments: HeadSegments, token: int, shape: HeadShape, element: Element
) -> None:
    """The value of a key that does not fit becomes NaN, as do all results that see it: a score may be any number."""
    offset, num_vectors = token * shape.num_kv_heads * shape.row_bytes, shape.head_dim // LANES
    spoilt = misfit(key, num_vectors, element)
    if shape.num_planes > 1:
        write_row(key, num_vectors, segments.keys + offset, _MINUS_ZERO, element)
        write_row(value, num_vectors, segments.values + offset, spoilt, element)
    else:
        write_row(key, num_vectors, segments.keys + offset, spoilt, element)


def read_keys(head: Address, shape: HeadShape, out: Address, element: Element) -> None:
    """Convert the 16 keys of a head to fp32 [head_dim][16] at the address `out`."""
    raise NotImplementedError


def _read_keys_of_bytes(head: Address, shape: HeadShape, out: Address, element: Element) -> None:
    if shape.num_planes > 1:
        read_byte_keys(head, shape.head_dim // LANES, out)
    else:
        transpose_byte_values(head, shape.head_dim // LANES, out)


def _read_keys_of_rows(head: Address, shape: HeadShape, out: Address, element: Element) -> None:
    transpose_rows(head, shape.num_kv_heads * shape.row_bytes, shape.head_dim // LANES, out, element)


def read_values(head: Address, shape: HeadShape, out: Address, element: Element) -> None:
    """Convert the 16 value rows of a head to fp32 [16][head_dim] at the address `out`."""
    raise NotImplementedError


def _read_values_of_bytes(head: Address, shape: HeadShape, out: Address, element: Element) -> None:
    read_byte_values(head, shape.head_dim // LANES, out)


def _read_values_of_rows(head: Address, shape: HeadShape, out: Address, element: Element) -> None:
    read_rows(head, shape.num_kv_heads * shape.row_bytes, shape.head_dim // LANES, out, element)


select_by_dtype(head_of, {types.int8: _head_of_bytes}, _head_of_rows)
select_by_dtype(write_head, {types.int8: _write_bytes}, _write_rows)
select_by_dtype(read_keys, {types.int8: _read_keys_of_bytes}, _read_keys_of_rows)
select_by_dtype(read_values, {types.int8: _read_values_of_bytes}, _read_values_of_rows)
