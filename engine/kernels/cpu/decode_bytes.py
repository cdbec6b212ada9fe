"""Vector loops of decode attention over KV in int8: `decode_vectors.py` calls them, and has those of other types.

Keys and values are multiplied as they lie (see `kv_segments.py`), with queries and softmax weights rounded to 16 bits,
whose sums are exact. VNNI multiplies those as two bytes each ("limbs"), other CPUs as they are: then the sums of
MAX_SHORTS numbers fit into int32. The error is 1/32512 of a query's largest number, and 1/65535 (1/32767 without VNNI)
of a segment's largest weight.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from engine.kernels.cpu.arguments import Address, AttentionMemory, Element, HeadShape, Matrix
from engine.kernels.cpu.compiler import (
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
from engine.kernels.cpu.kv_segments import ALL_BYTES, SIGN_BITS, scales_at, vector_at
from engine.kernels.cpu.machine import (
    FLOAT_BYTES,
    GROUP,
    KEYS,
    LANES,
    LIMBS_TAIL_BYTES,
    VECTOR_BYTES,
    knows_avx512,
    knows_vnni,
)
from engine.kernels.cpu.vectors import largest_magnitude, quantise_vectors, shorts_of, write_float

_INTP = types.intp
_QUERY_LEVELS = 127.0 * 256
_LIMB_LEVELS, _SHORT_LEVELS = 65535.0, 32767.0
_FACTOR_AT = 2 * KEYS
"""Where the factor of 16 rounded weights lies: behind them."""
_HIGH_THEN_LOW = [GROUP * lane + byte for byte in (1, 0) for lane in range(LANES)]
KNOWS_PAIRS = knows_avx512()
"""True if the scores of two segments, and two vectors of sums, fit into the registers for MAX_QUERY_ROWS rows: they
share the reads of queries and of weights.
"""


class Segment(NamedTuple):
    """One head of a segment, while code is written, and as many bytes `ahead` that are prefetched meanwhile, if any."""

    at: Value
    num_vectors: Value
    ahead: Value | None

    def prefetch(self, emit: Emitter, number: Value, lines: int = 1) -> None:
        """Prefetch what lies as far ahead as vector `number` and those behind it."""
        for i in range(lines if self.ahead is not None else 0):
            emit.prefetch(emit.at(vector_at(emit, self.ahead, number), i * VECTOR_BYTES), to_l2=True)

    def prefetch_scales(self, emit: Emitter) -> None:
        self.prefetch(emit, emit.builder.mul(self.num_vectors, INT64(GROUP)))


def split_queries(query: Address, num_rows: int, shape: HeadShape, memory: AttentionMemory, element: Element) -> Matrix:
    """`prepare_queries` with VNNI."""
    step = 2 * shape.head_dim + LIMBS_TAIL_BYTES
    for row in range(num_rows):
        at = query + row * shape.head_dim * FLOAT_BYTES
        split_query(at, shape.head_dim // LANES, memory.limbs + row * step, memory.factors + row * FLOAT_BYTES)
    return Matrix(memory.limbs, step)


def short_queries(query: Address, num_rows: int, shape: HeadShape, memory: AttentionMemory, element: Element) -> Matrix:
    """`prepare_queries` without VNNI."""
    num_vectors, step = shape.head_dim // LANES, 2 * shape.head_dim
    for row in range(num_rows):
        at = query + row * shape.head_dim * FLOAT_BYTES
        largest = largest_magnitude(at, num_vectors)
        quantise_vectors(at, num_vectors, np.float32(_QUERY_LEVELS) / largest, memory.limbs + row * step, np.uint16(0))
        write_float(memory.factors + row * FLOAT_BYTES, largest / np.float32(_QUERY_LEVELS))
    return Matrix(memory.limbs, step)


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
            read = emit.load(vector_at(emit, values_at, loop.index), FLOATS)
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
    factors = builder.fdiv(ir.Constant(largest.type, [most] * GROUP), largest, flags=("nsz",))
    levels = emit.rounded(builder.fmul(scaled, builder.shuffle_vector(factors, factors, zeros)))
    if knows_vnni():
        octets = builder.bitcast(levels, ALL_BYTES)
        limbs = builder.shuffle_vector(octets, octets, ir.Constant(ir.VectorType(INT32, 2 * LANES), _HIGH_THEN_LOW))
        emit.store(limbs, at, 1)
    else:
        emit.store(shorts_of(emit, levels), at, 1)
    factor = builder.fdiv(builder.extract_element(largest, INT32(0)), FLOAT(most))
    emit.store(factor, emit.at(at, _FACTOR_AT))


def _largest_of_four(emit: Emitter, bits: Value) -> Value:
    """Four times the largest of 16 positive fp32 numbers. LLVM's own reduction ends in another kind of register, and
    the way there and back takes as long as the rest.
    """
    builder, size = emit.builder, LANES
    while size > 1:
        half = max(GROUP, size // 2)
        other = [(lane + size // 2) % size if size <= GROUP else lane + half for lane in range(half)]
        low, high = (
            ([*range(half)], other)
            if size > GROUP
            else ([*range(GROUP)], [(lane ^ size // 2) for lane in range(GROUP)])
        )
        kind = ir.VectorType(INT32, half)
        parts = [builder.shuffle_vector(bits, bits, ir.Constant(kind, lanes)) for lanes in (low, high)]
        bits = emit.call(f"llvm.smax.v{half}i32", kind, *parts)
        size //= 2
    return builder.bitcast(bits, ir.VectorType(FLOAT, GROUP))


def score_bytes(emit: Emitter, queries: list[Value], segments: list[Segment], out: list[list[Value]]) -> None:
    """out[segment][row][0:16] = dot products of each prepared query with the 16 keys of a segment."""
    sums = (_scores_of_limbs if knows_vnni() else _scores_of_shorts)(emit, queries, segments)
    for segment, totals, rows in zip(segments, sums, out, strict=True):
        segment.prefetch_scales(emit)
        scales = emit.load(scales_at(emit, segment.at, segment.num_vectors), FLOATS)
        for total, row in zip(totals, rows, strict=True):
            emit.store(emit.builder.fmul(total, scales), row)


def _scores_of_limbs(emit: Emitter, queries: list[Value], segments: list[Segment]) -> list[list[Value]]:
    builder, num_vectors = emit.builder, segments[0].num_vectors
    dim = builder.mul(num_vectors, INT64(LANES))
    limbs = [emit.at(query, builder.mul(dim, INT64(i))) for query in queries for i in range(2)]
    tails = [emit.at(query, builder.mul(dim, INT64(2))) for query in queries]
    initial = [emit.splat(emit.load(emit.at(tail, 4 * i), INT32)) for tail in tails for i in range(2)]
    flip = constant(INTS, SIGN_BITS * 0x01010101)
    with emit.loop(builder.mul(num_vectors, INT64(GROUP)), initial * len(segments)) as loop:
        keys = [builder.xor(_read_keys(emit, segment, loop.index), flip) for segment in segments]
        places = [emit.at(limb, builder.mul(loop.index, INT64(GROUP))) for limb in limbs]
        fours = [emit.splat(emit.load(at, INT32, 1)) for at in places]
        pairs = [(unsigned, four) for unsigned in keys for four in fours]
        loop.next += [emit.dot_bytes(total, *pair) for total, pair in zip(loop.carried, pairs, strict=True)]
    return [_joined(emit, loop.next[i : i + len(limbs)]) for i in range(0, len(loop.next), len(limbs))]


def _scores_of_shorts(emit: Emitter, queries: list[Value], segments: list[Segment]) -> list[list[Value]]:
    builder, num_rows = emit.builder, len(queries)
    zeros = [constant(INTS, 0)] * (num_rows * len(segments))
    with emit.loop(builder.mul(segments[0].num_vectors, INT64(GROUP)), zeros) as loop:
        offset = builder.mul(loop.index, INT64(2 * GROUP))
        fours = [emit.at(query, offset) for query in queries]
        for i, segment in enumerate(segments):
            keys = _read_keys(emit, segment, loop.index)
            loop.next += _dot_shorts(emit, loop.carried[i * num_rows : (i + 1) * num_rows], fours, keys)
    floats = [builder.sitofp(total, FLOATS) for total in loop.next]
    return [floats[i : i + num_rows] for i in range(0, len(floats), num_rows)]


def add_bytes(emit: Emitter, weights: list[Value], values: Segment, out: list[Value]) -> None:
    """out[row] += sum over 16 tokens of weights[row][token] * value row. The weights are rounded ones."""
    builder, num_vectors = emit.builder, values.num_vectors
    factors = [emit.splat(emit.load(emit.at(at, _FACTOR_AT), FLOAT)) for at in weights]
    values.prefetch_scales(emit)
    num_pairs = builder.lshr(num_vectors, INT64(1)) if KNOWS_PAIRS else INT64(0)
    done = builder.shl(num_pairs, INT64(1))
    for first, count, size in ((INT64(0), num_pairs, 2), (done, builder.sub(num_vectors, done), 1)):
        if count is num_pairs and not KNOWS_PAIRS:
            continue
        with builder.if_then(builder.icmp_signed(">", count, INT64(0))), emit.loop(count, []) as loop:
            index = builder.add(first, builder.mul(loop.index, INT64(size)))
            indices = [builder.add(index, INT64(i)) for i in range(size)]
            _add_vectors(
                emit, weights, values, indices, [(at, factor) for at, factor in zip(out, factors, strict=True)]
            )


def _add_vectors(
    emit: Emitter, weights: list[Value], values: Segment, indices: list[Value], out: list[tuple[Value, Value]]
) -> None:
    """`add_bytes` for the vectors with these indices. out: of each row, a pointer and the factor of its sums."""
    builder, group_bytes = emit.builder, emit.builder.mul(values.num_vectors, INT64(VECTOR_BYTES))
    values.prefetch(emit, builder.mul(indices[0], INT64(KEYS // GROUP)), len(indices) * KEYS // GROUP)
    groups: list[list[Value]] = []
    for i in range(KEYS // GROUP):
        at = emit.at(values.at, builder.mul(group_bytes, INT64(i)))
        groups.append([emit.load(vector_at(emit, at, index), INTS) for index in indices])
    sums = (_sums_of_limbs if knows_vnni() else _sums_of_shorts)(emit, weights, groups)
    for i, index in enumerate(indices):
        for total, (out_at, factor) in zip(sums[i], out, strict=True):
            target = vector_at(emit, out_at, index)
            emit.store(emit.multiply_add(total, factor, emit.load(target, FLOATS)), target)


def _read_keys(emit: Emitter, segment: Segment, index: Value) -> Value:
    segment.prefetch(emit, index)
    return emit.load(vector_at(emit, segment.at, index), INTS)


def _sums_of_limbs(emit: Emitter, weights: list[Value], groups: list[list[Value]]) -> list[list[Value]]:
    """For each vector of a group, the sums of each row. groups: four tokens each."""
    limbs = [emit.at(at, LANES * i) for at in weights for i in range(2)]
    totals = [[constant(INTS, 0)] * len(limbs) for _ in groups[0]]
    for number, group in enumerate(groups):
        for i, limb in enumerate(limbs):
            four = emit.splat(emit.load(emit.at(limb, GROUP * number), INT32, 1))
            for of_vector, four_rows in zip(totals, group, strict=True):
                of_vector[i] = emit.dot_bytes(of_vector[i], four, four_rows)
    return [_joined(emit, of_vector) for of_vector in totals]


def _sums_of_shorts(emit: Emitter, weights: list[Value], groups: list[list[Value]]) -> list[list[Value]]:
    totals = [[constant(INTS, 0)] * len(weights) for _ in groups[0]]
    for number, group in enumerate(groups):
        fours = [emit.at(at, 2 * GROUP * number) for at in weights]
        totals = [_dot_shorts(emit, *each) for each in zip(totals, [fours] * len(group), group, strict=True)]
    return [[emit.builder.sitofp(total, FLOATS) for total in of_vector] for of_vector in totals]


def _joined(emit: Emitter, limbs: list[Value]) -> list[Value]:
    """256 * high + low as fp32, for int32 vectors high, low, high, low, ..."""
    floats = [emit.builder.sitofp(total, FLOATS) for total in limbs]
    factor = constant(FLOATS, 256.0)
    return [emit.multiply_add(high, factor, low) for high, low in zip(floats[::2], floats[1::2], strict=True)]


def _dot_shorts(emit: Emitter, totals: list[Value], fours: list[Value], lanes: Value) -> list[Value]:
    """Add the products of each lane's four signed bytes with the four int16 (in SHORTS_ORDER) at each pointer."""
    for i, pairs in enumerate((emit.even_bytes(lanes), emit.odd_bytes(lanes))):
        twos = [emit.splat(emit.load(emit.at(four, 4 * i), INT32, 1)) for four in fours]
        totals = [emit.dot_pairs(total, two, pairs) for total, two in zip(totals, twos, strict=True)]
    return totals
