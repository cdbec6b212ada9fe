"""Vector loops over KV in int8. The cache is laid out as VNNI multiplies it: GROUP bytes of one sum in each lane.

A segment of the cache (KEYS tokens of one head) is 16 vectors of bytes for each 16 of head_dim, then the tokens' 16
scales in fp32. Keys: [head_dim / 4][16 tokens][4 dims]; the lane of a token sums its dot product. Values:
[4][head_dim][4 tokens]; the lane of a dim sums its weighted sum. Nothing is converted or folded on the way.

Queries and softmax weights are rounded to 16 bits and split into two bytes ("limbs"), whose sums are exact. The error
is 1/32512 of a query's largest number, and 1/65535 of a segment's largest weight. Arguments are as in `vectors.py`;
`segment` is an address.
"""

from llvmlite import ir
from numba import types

from engine.kernels.cpu.constants import (
    GROUP,
    INT8_LEVELS,
    KEYS,
    LANES,
    VECTOR_BYTES,
)
from engine.kernels.cpu.ir import (
    BYTES,
    FLOAT,
    FLOATS,
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
)
from engine.kernels.cpu.vectors import TINY, largest_of

_NUM_GROUPS = KEYS // GROUP
_SIGN_BITS = 0x80
_QUERY_LEVELS = 127.0 * 256
_WEIGHT_LEVELS = 65535.0
_QUADS = ir.VectorType(INT32, LANES // GROUP)
_ALL_BYTES = ir.VectorType(INT8, LANES * GROUP)
_INTP = types.intp


def _dot(emit: Emitter, totals: Value, unsigned: Value, signed: Value) -> Value:
    """Add the products of each lane's four bytes to the lane's total."""
    return emit.call("llvm.x86.avx512.vpdpbusd.512", INTS, totals, unsigned, signed)


def _joined(emit: Emitter, high: Value, low: Value) -> Value:
    """256 * high + low of int32 vectors, as fp32."""
    builder = emit.builder
    return emit.multiply_add(builder.sitofp(high, FLOATS), constant(FLOATS, 256.0), builder.sitofp(low, FLOATS))


def _scales_at(emit: Emitter, segment: Value, num_vectors: Value) -> Value:
    """Pointer to a segment's 16 scales."""
    return emit.at(segment, emit.builder.mul(num_vectors, INT64(LANES * KEYS)))


def _vector_at(emit: Emitter, segment: Value, index: Value) -> Value:
    return emit.at(segment, emit.builder.mul(index, INT64(VECTOR_BYTES)))


@emitted
def split_query(typing: TypingContext, values: NumbaType, num_vectors: NumbaType, out: NumbaType) -> Intrinsic:
    """Split a query of fp32 values; returns the factor of its scores.

    out: the high bytes, the low bytes, then for each an int32 that cancels what the keys' zero point adds to the sums.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
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


def score_bytes(emit: Emitter, queries: list[Value], keys: tuple[Value, Value], out: list[Value]) -> None:
    """out[row][0:16] = dot products of each split query with 16 keys. keys: (segment, vectors of a row)."""
    builder, (segment, num_vectors) = emit.builder, keys
    dim = builder.mul(num_vectors, INT64(LANES))
    limbs = [emit.at(query, builder.mul(dim, INT64(i))) for query in queries for i in range(2)]
    tails = [emit.at(query, builder.mul(dim, INT64(2))) for query in queries]
    initial = [emit.splat(emit.load(emit.at(tail, 4 * i), INT32)) for tail in tails for i in range(2)]
    flip = constant(INTS, _SIGN_BITS * 0x01010101)
    with emit.loop(builder.mul(num_vectors, INT64(GROUP)), initial) as loop:
        unsigned = builder.xor(emit.load(_vector_at(emit, segment, loop.index), INTS), flip)
        for limb, total in zip(limbs, loop.carried, strict=True):
            four = emit.load(emit.at(limb, builder.mul(loop.index, INT64(GROUP))), INT32, 1)
            loop.next.append(_dot(emit, total, unsigned, emit.splat(four)))
    scales = emit.load(_scales_at(emit, segment, num_vectors), FLOATS)
    for row, at in enumerate(out):
        emit.store(builder.fmul(_joined(emit, *loop.next[2 * row : 2 * row + 2]), scales), at)


def add_bytes(emit: Emitter, weights: list[Value], values: tuple[Value, Value], out: list[Value]) -> None:
    """out[row] += sum over 16 tokens of weights[row][token] * value row. values: (segment, vectors of a row).

    The weights are overwritten with their limbs.
    """
    builder, (segment, num_vectors) = emit.builder, values
    scales = emit.load(_scales_at(emit, segment, num_vectors), FLOATS)
    factors = [_split_weights(emit, at, scales) for at in weights]
    limbs = [emit.at(at, LANES * i) for at in weights for i in range(2)]
    group_bytes = builder.mul(num_vectors, INT64(VECTOR_BYTES))
    with emit.loop(num_vectors, []) as loop:
        at = _vector_at(emit, segment, loop.index)
        totals = [constant(INTS, 0)] * len(limbs)
        for group in range(_NUM_GROUPS):
            four_rows = emit.load(emit.at(at, builder.mul(group_bytes, INT64(group))), INTS)
            for i, limb in enumerate(limbs):
                four = emit.splat(emit.load(emit.at(limb, GROUP * group), INT32, 1))
                totals[i] = _dot(emit, totals[i], four, four_rows)
        for row, (factor, out_at) in enumerate(zip(factors, out, strict=True)):
            target = _vector_at(emit, out_at, loop.index)
            joined = _joined(emit, *totals[2 * row : 2 * row + 2])
            emit.store(emit.multiply_add(joined, factor, emit.load(target, FLOATS)), target)


def _split_weights(emit: Emitter, at: Value, scales: Value) -> Value:
    """Multiply 16 weights >= 0 by their values' scales and overwrite them with their high and low bytes.

    Returns the factor of the sums.
    """
    builder = emit.builder
    scaled = builder.fmul(emit.load(at, FLOATS), scales)
    largest = emit.call("llvm.maxnum.f32", FLOAT, emit.call("llvm.vector.reduce.fmax.v16f32", FLOAT, scaled), TINY)
    levels = emit.rounded(builder.fmul(scaled, emit.splat(builder.fdiv(FLOAT(_WEIGHT_LEVELS), largest))))
    for i, limb in enumerate((builder.lshr(levels, constant(INTS, 8)), levels)):
        emit.store(builder.trunc(limb, BYTES), emit.at(at, LANES * i), 1)
    return emit.splat(builder.fdiv(largest, FLOAT(_WEIGHT_LEVELS)))


def _store_scale(emit: Emitter, values: Value, num_vectors: Value, segment: Value, token: Value) -> Value:
    """Store the scale of a token's row; returns the factor that quantises its values. token: 0 to 15."""
    builder = emit.builder
    largest = largest_of(emit, values, num_vectors)
    at = emit.at(_scales_at(emit, segment, num_vectors), builder.mul(token, INT64(4)))
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
        lane = emit.at(segment_at, builder.mul(args[3], INT64(GROUP)))
        with emit.loop(args[1], []) as loop:
            read = emit.load(_vector_at(emit, values_at, loop.index), FLOATS)
            levels = builder.trunc(emit.rounded(builder.fmul(read, factor)), BYTES)
            groups = builder.bitcast(levels, _QUADS)
            for i in range(LANES // GROUP):
                index = builder.add(builder.mul(loop.index, INT64(LANES // GROUP)), INT64(i))
                emit.store(builder.extract_element(groups, INT32(i)), _vector_at(emit, lane, index))
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
        group, lane = builder.lshr(args[3], INT64(2)), builder.and_(args[3], INT64(GROUP - 1))
        group_at = emit.at(segment_at, builder.mul(group, builder.mul(args[1], INT64(VECTOR_BYTES))))
        bits = emit.splat(builder.trunc(builder.mul(lane, INT64(8)), INT32))
        token_bytes = builder.shl(INT64(0x1111111111111111), lane)
        mask = builder.bitcast(token_bytes, ir.VectorType(ir.IntType(1), LANES * GROUP))
        with emit.loop(args[1], []) as loop:
            read = emit.load(_vector_at(emit, values_at, loop.index), FLOATS)
            levels = builder.shl(emit.rounded(builder.fmul(read, factor)), bits)
            at = builder.bitcast(_vector_at(emit, group_at, loop.index), _ALL_BYTES.as_pointer())
            spread = builder.bitcast(levels, _ALL_BYTES)
            emit.call("llvm.masked.store.v64i8.p0", VOID, spread, at, INT32(1), mask)
        return context.get_dummy_value()

    return types.void(*[_INTP] * 4), generate


def _fours(emit: Emitter, at: Value) -> list[Value]:
    """Four fp32 vectors: the signed bytes number 0, 1, 2 and 3 of 16 lanes."""
    builder, lanes = emit.builder, emit.load(at, INTS)
    shifted = [builder.shl(lanes, constant(INTS, 24 - 8 * i)) for i in range(GROUP)]
    return [builder.sitofp(builder.ashr(lane, constant(INTS, 24)), FLOATS) for lane in shifted]


@emitted
def read_byte_keys(typing: TypingContext, segment: NumbaType, num_vectors: NumbaType, out: NumbaType) -> Intrinsic:
    """Convert a segment's keys to fp32 [head_dim][16]."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        segment_at, out_at = emit.pointer(args[0]), emit.pointer(args[2])
        scales = emit.load(_scales_at(emit, segment_at, args[1]), FLOATS)
        with emit.loop(builder.mul(args[1], INT64(GROUP)), []) as loop:
            target = _vector_at(emit, out_at, builder.mul(loop.index, INT64(GROUP)))
            for i, numbers in enumerate(_fours(emit, _vector_at(emit, segment_at, loop.index))):
                emit.store(builder.fmul(numbers, scales), emit.at(target, i * VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(*[_INTP] * 3), generate


@emitted
def read_byte_values(typing: TypingContext, segment: NumbaType, num_vectors: NumbaType, out: NumbaType) -> Intrinsic:
    """Convert a segment's value rows to fp32 [16][head_dim]."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        segment_at, out_at = emit.pointer(args[0]), emit.pointer(args[2])
        scales_at, row_bytes = _scales_at(emit, segment_at, args[1]), builder.mul(args[1], INT64(VECTOR_BYTES))
        scales = [emit.splat(emit.load(emit.at(scales_at, 4 * token), FLOAT)) for token in range(KEYS)]
        with emit.loop(args[1], []) as loop:
            for group in range(_NUM_GROUPS):
                at = emit.at(_vector_at(emit, segment_at, loop.index), builder.mul(row_bytes, INT64(group)))
                for token, numbers in enumerate(_fours(emit, at), GROUP * group):
                    target = emit.at(_vector_at(emit, out_at, loop.index), builder.mul(row_bytes, INT64(token)))
                    emit.store(builder.fmul(numbers, scales[token]), target)
        return context.get_dummy_value()

    return types.void(*[_INTP] * 3), generate
