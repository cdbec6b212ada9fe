"""Vector loops over KV in int8, which lies as VNNI multiplies it: four bytes that belong together in each lane.

A part of the cache, 16 tokens of one head, is 16 vectors' worth of bytes for each 16 of head_dim, then the tokens' 16
scales in fp32. Keys: [head_dim / 4][16 tokens][4 dims], a dot product adds up in its token's lane. Values:
[4][head_dim][4 tokens], a weighted sum in its dim's lane. Nothing is converted or folded on the way.

What they are multiplied with is rounded to 16 bits and split into two bytes, whose sums are exact: to 1/32512 of a
query's largest number, to 1/65535 of the largest weight of a part. Arguments are as in `vectors.py`; `part` is an
address.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.ir import BYTES, FLOAT, FLOATS, INT8, INT32, INT64, INTS, LANES, VOID, Emitter, constant
from engine.cpu.vectors import INT8_LEVELS, KEYS, TINY, largest_of

LIMBS_TAIL = 64
"""Bytes of a split query behind its two bytes for each number: what the keys' zero point adds to their sums."""
_GROUP = 4
_NUM_GROUPS = KEYS // _GROUP
_VECTOR_BYTES = 64
_SIGN_BITS = 0x80
_QUERY_LEVELS = 127.0 * 256
_WEIGHT_LEVELS = 65535.0
_QUADS = ir.VectorType(INT32, LANES // _GROUP)
_ALL_BYTES = ir.VectorType(INT8, LANES * _GROUP)
_INTP = types.intp
_emit: Callable[[Callable[..., Any]], Any] = intrinsic(prefer_literal=True)


def _dot(emit: Emitter, totals: Any, unsigned: Any, signed: Any) -> Any:
    """To each lane's total, the products of its four bytes."""
    return emit.call("llvm.x86.avx512.vpdpbusd.512", INTS, totals, unsigned, signed)


def _joined(emit: Emitter, high: Any, low: Any) -> Any:
    """256 * high + low, as fp32."""
    builder = emit.builder
    return emit.multiply_add(builder.sitofp(high, FLOATS), constant(FLOATS, 256.0), builder.sitofp(low, FLOATS))


def _scales_at(emit: Emitter, part: Any, num_vectors: Any) -> Any:
    """Where a part's 16 scales are."""
    return emit.at(part, emit.builder.mul(num_vectors, INT64(LANES * KEYS)))


def _vector_at(emit: Emitter, part: Any, index: Any) -> Any:
    return emit.at(part, emit.builder.mul(index, INT64(_VECTOR_BYTES)))


@_emit
def split_query(typing: Any, values: Any, num_vectors: Any, out: Any) -> Any:
    """fp32 values as high bytes, low bytes and, for each, the int32 that takes back what the keys' zero point adds;
    returns their factor.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        values_at, out_at = emit.pointer(args[0]), emit.pointer(args[2])
        largest, dim = largest_of(emit, args[0], args[1]), builder.mul(args[1], INT64(LANES))
        factor = emit.splat(builder.fdiv(FLOAT(_QUERY_LEVELS), largest))
        with emit.loop(args[1], [constant(INTS, 0)] * 2) as loop:
            read = emit.load(_vector_at(emit, values_at, loop.index), FLOATS)
            levels = emit.rounded(builder.fmul(read, factor))
            high = builder.ashr(builder.add(levels, constant(INTS, 128)), constant(INTS, 8))
            low = builder.sub(levels, builder.shl(high, constant(INTS, 8)))
            at = emit.at(out_at, builder.mul(loop.index, INT64(LANES)))
            for i, limb in enumerate((high, low)):
                emit.store(builder.trunc(limb, BYTES), emit.at(at, builder.mul(dim, INT64(i))), 1)
                loop.next.append(builder.add(loop.carried[i], limb))
        for i, totals in enumerate(loop.next):
            total = emit.call("llvm.vector.reduce.add.v16i32", INT32, totals)
            added = builder.mul(total, INT32(-_SIGN_BITS))
            emit.store(added, emit.at(out_at, builder.add(builder.mul(dim, INT64(2)), INT64(4 * i))))
        return builder.fdiv(largest, FLOAT(_QUERY_LEVELS))

    return types.float32(_INTP, _INTP, _INTP), generate


def score_bytes(emit: Emitter, queries: list[Any], keys: tuple[Any, Any], out: list[Any]) -> None:
    """out[row][0:16] = dot products of each split query with 16 keys; keys: (part, vectors of a row)."""
    builder, (part, num_vectors) = emit.builder, keys
    dim = builder.mul(num_vectors, INT64(LANES))
    limbs = [emit.at(query, builder.mul(dim, INT64(i))) for query in queries for i in range(2)]
    tails = [emit.at(query, builder.mul(dim, INT64(2))) for query in queries]
    begun = [emit.splat(emit.load(emit.at(tail, 4 * i), INT32)) for tail in tails for i in range(2)]
    flip = constant(INTS, _SIGN_BITS * 0x01010101)
    with emit.loop(builder.mul(num_vectors, INT64(_GROUP)), begun) as loop:
        unsigned = builder.xor(emit.load(_vector_at(emit, part, loop.index), INTS), flip)
        for limb, total in zip(limbs, loop.carried, strict=True):
            four = emit.load(emit.at(limb, builder.mul(loop.index, INT64(_GROUP))), INT32, 1)
            loop.next.append(_dot(emit, total, unsigned, emit.splat(four)))
    scales = emit.load(_scales_at(emit, part, num_vectors), FLOATS)
    for row, at in enumerate(out):
        emit.store(builder.fmul(_joined(emit, *loop.next[2 * row : 2 * row + 2]), scales), at)


def add_bytes(emit: Emitter, weights: list[Any], values: tuple[Any, Any], out: list[Any]) -> None:
    """out[row] += sum over 16 tokens of weights[row][token] * value row; values: (part, vectors of a row). The weights
    are replaced by their two bytes.
    """
    builder, (part, num_vectors) = emit.builder, values
    scales = emit.load(_scales_at(emit, part, num_vectors), FLOATS)
    factors = [_split_weights(emit, at, scales) for at in weights]
    limbs = [emit.at(at, LANES * i) for at in weights for i in range(2)]
    group_bytes = builder.mul(num_vectors, INT64(_VECTOR_BYTES))
    with emit.loop(num_vectors, []) as loop:
        at = _vector_at(emit, part, loop.index)
        totals = [constant(INTS, 0)] * len(limbs)
        for group in range(_NUM_GROUPS):
            four_rows = emit.load(emit.at(at, builder.mul(group_bytes, INT64(group))), INTS)
            for i, limb in enumerate(limbs):
                four = emit.splat(emit.load(emit.at(limb, _GROUP * group), INT32, 1))
                totals[i] = _dot(emit, totals[i], four, four_rows)
        for row, (factor, place) in enumerate(zip(factors, out, strict=True)):
            target = _vector_at(emit, place, loop.index)
            joined = _joined(emit, *totals[2 * row : 2 * row + 2])
            emit.store(emit.multiply_add(joined, factor, emit.load(target, FLOATS)), target)


def _split_weights(emit: Emitter, at: Any, scales: Any) -> Any:
    """16 weights of 0 or more, times their values' scales, as high bytes and low bytes in their place; returns their
    factor.
    """
    builder = emit.builder
    scaled = builder.fmul(emit.load(at, FLOATS), scales)
    largest = emit.call("llvm.maxnum.f32", FLOAT, emit.call("llvm.vector.reduce.fmax.v16f32", FLOAT, scaled), TINY)
    levels = emit.rounded(builder.fmul(scaled, emit.splat(builder.fdiv(FLOAT(_WEIGHT_LEVELS), largest))))
    for i, limb in enumerate((builder.lshr(levels, constant(INTS, 8)), levels)):
        emit.store(builder.trunc(limb, BYTES), emit.at(at, LANES * i), 1)
    return emit.splat(builder.fdiv(largest, FLOAT(_WEIGHT_LEVELS)))


def _quantised(emit: Emitter, values: Any, num_vectors: Any, place: tuple[Any, Any]) -> Any:
    """Store the scale of a token's row; returns what its values are multiplied with. place: (part, token of 16)."""
    builder, (part, token) = emit.builder, place
    largest = largest_of(emit, values, num_vectors)
    at = emit.at(_scales_at(emit, part, num_vectors), builder.mul(token, INT64(4)))
    emit.store(builder.fdiv(largest, FLOAT(INT8_LEVELS)), at)
    return emit.splat(builder.fdiv(FLOAT(INT8_LEVELS), largest))


@_emit
def write_key(typing: Any, values: Any, num_vectors: Any, part: Any, token: Any) -> Any:
    """fp32 values as the key of a part's token."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        values_at, part_at = emit.pointer(args[0]), emit.pointer(args[2])
        factor = _quantised(emit, args[0], args[1], (part_at, args[3]))
        lane = emit.at(part_at, builder.mul(args[3], INT64(_GROUP)))
        with emit.loop(args[1], []) as loop:
            read = emit.load(_vector_at(emit, values_at, loop.index), FLOATS)
            levels = builder.trunc(emit.rounded(builder.fmul(read, factor)), BYTES)
            groups = builder.bitcast(levels, _QUADS)
            for i in range(LANES // _GROUP):
                index = builder.add(builder.mul(loop.index, INT64(LANES // _GROUP)), INT64(i))
                emit.store(builder.extract_element(groups, INT32(i)), _vector_at(emit, lane, index))
        return context.get_dummy_value()

    return types.void(*[_INTP] * 4), generate


@_emit
def write_value(typing: Any, values: Any, num_vectors: Any, part: Any, token: Any) -> Any:
    """fp32 values as the value row of a part's token: each of its bytes is between those of other tokens."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        values_at, part_at = emit.pointer(args[0]), emit.pointer(args[2])
        factor = _quantised(emit, args[0], args[1], (part_at, args[3]))
        group, lane = builder.lshr(args[3], INT64(2)), builder.and_(args[3], INT64(_GROUP - 1))
        group_at = emit.at(part_at, builder.mul(group, builder.mul(args[1], INT64(_VECTOR_BYTES))))
        bits = emit.splat(builder.trunc(builder.mul(lane, INT64(8)), INT32))
        own = builder.shl(INT64(0x1111111111111111), lane)
        mask = builder.bitcast(own, ir.VectorType(ir.IntType(1), LANES * _GROUP))
        with emit.loop(args[1], []) as loop:
            read = emit.load(_vector_at(emit, values_at, loop.index), FLOATS)
            levels = builder.shl(emit.rounded(builder.fmul(read, factor)), bits)
            at = builder.bitcast(_vector_at(emit, group_at, loop.index), _ALL_BYTES.as_pointer())
            spread = builder.bitcast(levels, _ALL_BYTES)
            emit.call("llvm.masked.store.v64i8.p0", VOID, spread, at, INT32(1), mask)
        return context.get_dummy_value()

    return types.void(*[_INTP] * 4), generate


def _fours(emit: Emitter, at: Any) -> list[Any]:
    """The signed bytes number 0, 1, 2 and 3 of 16 lanes, as fp32."""
    builder, lanes = emit.builder, emit.load(at, INTS)
    shifted = [builder.shl(lanes, constant(INTS, 24 - 8 * i)) for i in range(_GROUP)]
    return [builder.sitofp(builder.ashr(each, constant(INTS, 24)), FLOATS) for each in shifted]


@_emit
def read_byte_keys(typing: Any, part: Any, num_vectors: Any, out: Any) -> Any:
    """A part's keys as fp32 [head_dim][16]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        part_at, out_at = emit.pointer(args[0]), emit.pointer(args[2])
        scales = emit.load(_scales_at(emit, part_at, args[1]), FLOATS)
        with emit.loop(builder.mul(args[1], INT64(_GROUP)), []) as loop:
            target = _vector_at(emit, out_at, builder.mul(loop.index, INT64(_GROUP)))
            for i, numbers in enumerate(_fours(emit, _vector_at(emit, part_at, loop.index))):
                emit.store(builder.fmul(numbers, scales), emit.at(target, i * _VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(*[_INTP] * 3), generate


@_emit
def read_byte_values(typing: Any, part: Any, num_vectors: Any, out: Any) -> Any:
    """A part's value rows as fp32 [16][head_dim]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        part_at, out_at = emit.pointer(args[0]), emit.pointer(args[2])
        scales_at, row_bytes = _scales_at(emit, part_at, args[1]), builder.mul(args[1], INT64(_VECTOR_BYTES))
        scales = [emit.splat(emit.load(emit.at(scales_at, 4 * token), FLOAT)) for token in range(KEYS)]
        with emit.loop(args[1], []) as loop:
            for group in range(_NUM_GROUPS):
                at = emit.at(_vector_at(emit, part_at, loop.index), builder.mul(row_bytes, INT64(group)))
                for token, numbers in enumerate(_fours(emit, at), _GROUP * group):
                    target = emit.at(_vector_at(emit, out_at, loop.index), builder.mul(row_bytes, INT64(token)))
                    emit.store(builder.fmul(numbers, scales[token]), target)
        return context.get_dummy_value()

    return types.void(*[_INTP] * 3), generate
