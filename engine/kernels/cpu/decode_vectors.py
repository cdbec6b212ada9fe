"""Vector loops of decode attention: 16 keys or values of the cache against the query rows that share them.

A row of the cache is read and converted once for up to MAX_QUERY_ROWS query rows. Arguments are as in `vectors.py`.
`num_rows` is a compile-time constant.

Keys and values in int8 are multiplied as they lie (see `kv_segments.py`), with queries and softmax weights rounded to
16 bits, whose sums are exact. VNNI multiplies those as two bytes each ("limbs"), other CPUs as they are: then the sums
of MAX_SHORTS numbers fit into int32. The error is 1/32512 of a query's largest number, and 1/65535 (1/32767 without
VNNI) of a segment's largest weight.
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
from engine.kernels.cpu.kv_segments import SIGN_BITS, scales_at, vector_at
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
from engine.kernels.cpu.parts import select_by_dtype
from engine.kernels.cpu.vectors import largest_magnitude, quantise_vectors, shorts_of, write_float

_HALF = KEYS // 2
_INTP = types.intp
_QUERY_LEVELS = 127.0 * 256
_LIMB_LEVELS, _SHORT_LEVELS = 65535.0, 32767.0
_IN_ORDER = [*range(0, KEYS, 2), *range(1, KEYS, 2)]


class CacheRows(NamedTuple):
    """16 rows of one head in the cache: the address of the first, bytes from row to row, and vectors of a row."""

    address: Address
    step: int
    num_vectors: int


class _Cache:
    """`CacheRows` as LLVM values, while code is written."""

    def __init__(self, emit: Emitter, rows: Value, element: NumbaType) -> None:
        address, step, self.num_vectors = emit.members(rows, 3)
        self._emit, self._element = emit, element
        self._rows = [emit.at(emit.pointer(address), emit.builder.mul(step, INT64(key))) for key in range(KEYS)]

    def floats(self, key: int, index: Value) -> Value:
        """Vector number `index` of the row of a key, as fp32."""
        column = self._emit.builder.mul(index, INT64(LANES * self._element.bitwidth // 8))
        return self._emit.floats(self._emit.at(self._rows[key], column), self._element)


def prepare_queries(
    query: Address, num_rows: int, shape: HeadShape, memory: AttentionMemory, element: Element
) -> Matrix:
    """Bring fp32 rows [num_rows, head_dim] into the form that `score_keys` reads.

    Factors of the rows' scores that are not 1 are written to memory.factors. The result may be in memory.limbs.
    """
    raise NotImplementedError


def _split_queries(
    query: Address, num_rows: int, shape: HeadShape, memory: AttentionMemory, element: Element
) -> Matrix:
    step = 2 * shape.head_dim + LIMBS_TAIL_BYTES
    for row in range(num_rows):
        at = query + row * shape.head_dim * FLOAT_BYTES
        split_query(at, shape.head_dim // LANES, memory.limbs + row * step, memory.factors + row * FLOAT_BYTES)
    return Matrix(memory.limbs, step)


def _short_queries(
    query: Address, num_rows: int, shape: HeadShape, memory: AttentionMemory, element: Element
) -> Matrix:
    num_vectors, step = shape.head_dim // LANES, 2 * shape.head_dim
    for row in range(num_rows):
        at = query + row * shape.head_dim * FLOAT_BYTES
        largest = largest_magnitude(at, num_vectors)
        quantise_vectors(at, num_vectors, np.float32(_QUERY_LEVELS) / largest, memory.limbs + row * step, np.uint16(0))
        write_float(memory.factors + row * FLOAT_BYTES, largest / np.float32(_QUERY_LEVELS))
    return Matrix(memory.limbs, step)


def _plain_queries(
    query: Address, num_rows: int, shape: HeadShape, memory: AttentionMemory, element: Element
) -> Matrix:
    return Matrix(query, shape.head_dim * FLOAT_BYTES)


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
def score_keys(
    typing: TypingContext, queries: NumbaType, keys: NumbaType, out: NumbaType, num_rows: NumbaType, element: NumbaType
) -> Intrinsic:
    """out[row][0:16] = dot products of each query row with 16 keys.

    queries: a Matrix of rows as `prepare_queries` returns it; keys: CacheRows; out: a Matrix.
    """
    rows = range(num_rows.literal_value)
    num_keys = _HALF if knows_avx512() else 4 // len(rows)  # whose sums fit into the registers

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        query_rows, out_rows = (_row_pointers(emit, args[i], rows) for i in (0, 2))
        if element == types.int8:
            score_bytes(emit, query_rows, _segment(emit, args[1]), out_rows)
            return context.get_dummy_value()
        cache = _Cache(emit, args[1], element)
        sums: list[Value] = []  # of key 0 with each row, then of key 1
        for first in range(0, KEYS, num_keys):
            with emit.loop(cache.num_vectors, [constant(FLOATS, 0.0)] * (num_keys * len(rows))) as loop:
                column = builder.mul(loop.index, INT64(VECTOR_BYTES))
                left = [emit.load(emit.at(row, column), FLOATS) for row in query_rows]
                for key in range(num_keys):
                    right = cache.floats(first + key, loop.index)
                    for row in rows:
                        total = loop.carried[key * len(rows) + row]
                        loop.next.append(emit.multiply_add(left[row], right, total))
            sums += loop.next
        for row in rows:
            of_row = sums[row :: len(rows)]
            low, high = _fold(builder, of_row[:_HALF]), _fold(builder, of_row[_HALF:])
            mixed = _merge(builder, low, high, 2)  # keys 0, 8, 1, 9, ...
            emit.store(builder.shuffle_vector(mixed, mixed, ir.Constant(INTS, _IN_ORDER)), out_rows[row])
        return context.get_dummy_value()

    return types.void(queries, keys, out, num_rows, element), generate


def _row_pointers(emit: Emitter, matrix: Value, rows: range) -> list[Value]:
    pointer, step = emit.matrix(matrix)
    return [emit.at(pointer, emit.builder.mul(step, INT64(row))) for row in rows]


def _segment(emit: Emitter, rows: Value) -> tuple[Value, Value]:
    """A segment in int8 and the vectors of a row, from `CacheRows`."""
    address, _, num_vectors = emit.members(rows, 3)
    return emit.pointer(address), num_vectors


def _fold(builder: Builder, vectors: list[Value]) -> Value:
    """Fold 8 vectors into one, whose lanes 2 i and 2 i + 1 add up to the sum over the lanes of vector i."""
    size = LANES
    while len(vectors) > 1:
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors, size = [_merge(builder, low, high, size) for low, high in pairs], size // 2
    return vectors[0]


def _merge(builder: Builder, low: Value, high: Value, size: int) -> Value:
    """Fold every `size` lanes of both vectors to half as many; the results of `low` and `high` alternate."""
    half = size // 2
    left: list[int] = []
    right: list[int] = []
    for start in range(0, LANES, size):
        for vector in range(2):
            first = start + vector * LANES
            left += range(first, first + half)
            right += range(first + half, first + size)
    lanes = [builder.shuffle_vector(low, high, ir.Constant(INTS, mask)) for mask in (left, right)]
    return builder.fadd(*lanes, flags=("fast",))


@emitted
def add_values(
    typing: TypingContext,
    weights: NumbaType,
    values: NumbaType,
    out: NumbaType,
    num_rows: NumbaType,
    element: NumbaType,
) -> Intrinsic:
    """out[row] += sum over 16 keys of weights[row][key] * value row. The weights are undefined afterwards.

    weights, out: Matrix; values: CacheRows.
    """
    rows = range(num_rows.literal_value)

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        weight_rows, out_rows = (_row_pointers(emit, args[i], rows) for i in (0, 2))
        if element == types.int8:
            add_bytes(emit, weight_rows, _segment(emit, args[1]), out_rows)
            return context.get_dummy_value()
        cache = _Cache(emit, args[1], element)
        with emit.loop(cache.num_vectors, []) as loop:
            column = builder.mul(loop.index, INT64(VECTOR_BYTES))
            targets = [emit.at(row, column) for row in out_rows]
            totals = [[emit.load(target, FLOATS), constant(FLOATS, 0.0)] for target in targets]
            for key in range(KEYS):
                value = cache.floats(key, loop.index)
                for row in rows:
                    weight = emit.splat(emit.load(emit.at(weight_rows[row], 4 * key), FLOAT))
                    totals[row][key % 2] = emit.multiply_add(weight, value, totals[row][key % 2])
            for target, (even, odd) in zip(targets, totals, strict=True):
                emit.store(builder.fadd(even, odd), target)
        return context.get_dummy_value()

    return types.void(weights, values, out, num_rows, element), generate


def score_bytes(emit: Emitter, queries: list[Value], keys: tuple[Value, Value], out: list[Value]) -> None:
    """out[row][0:16] = dot products of each prepared query with 16 keys. keys: (segment, vectors of a row)."""
    segment, num_vectors = keys
    sums = (_scores_of_limbs if knows_vnni() else _scores_of_shorts)(emit, queries, segment, num_vectors)
    scales = emit.load(scales_at(emit, segment, num_vectors), FLOATS)
    for total, at in zip(sums, out, strict=True):
        emit.store(emit.builder.fmul(total, scales), at)


def _scores_of_limbs(emit: Emitter, queries: list[Value], segment: Value, num_vectors: Value) -> list[Value]:
    builder = emit.builder
    dim = builder.mul(num_vectors, INT64(LANES))
    limbs = [emit.at(query, builder.mul(dim, INT64(i))) for query in queries for i in range(2)]
    tails = [emit.at(query, builder.mul(dim, INT64(2))) for query in queries]
    initial = [emit.splat(emit.load(emit.at(tail, 4 * i), INT32)) for tail in tails for i in range(2)]
    flip = constant(INTS, SIGN_BITS * 0x01010101)
    with emit.loop(builder.mul(num_vectors, INT64(GROUP)), initial) as loop:
        unsigned = builder.xor(emit.load(vector_at(emit, segment, loop.index), INTS), flip)
        for limb, total in zip(limbs, loop.carried, strict=True):
            four = emit.load(emit.at(limb, builder.mul(loop.index, INT64(GROUP))), INT32, 1)
            loop.next.append(emit.dot_bytes(total, unsigned, emit.splat(four)))
    return _joined(emit, loop.next)


def _scores_of_shorts(emit: Emitter, queries: list[Value], segment: Value, num_vectors: Value) -> list[Value]:
    builder = emit.builder
    with emit.loop(builder.mul(num_vectors, INT64(GROUP)), [constant(INTS, 0)] * len(queries)) as loop:
        offset = builder.mul(loop.index, INT64(2 * GROUP))
        fours = [emit.at(query, offset) for query in queries]
        keys = emit.load(vector_at(emit, segment, loop.index), INTS)
        loop.next += _dot_shorts(emit, loop.carried, fours, keys)
    return [builder.sitofp(total, FLOATS) for total in loop.next]


def add_bytes(emit: Emitter, weights: list[Value], values: tuple[Value, Value], out: list[Value]) -> None:
    """out[row] += sum over 16 tokens of weights[row][token] * value row. values: (segment, vectors of a row).

    The weights are overwritten: with their limbs, or as numbers of 16 bits.
    """
    builder, (segment, num_vectors) = emit.builder, values
    scales = emit.load(scales_at(emit, segment, num_vectors), FLOATS)
    factors = [_round_weights(emit, at, scales) for at in weights]
    group_bytes = builder.mul(num_vectors, INT64(VECTOR_BYTES))
    with emit.loop(num_vectors, []) as loop:
        at = vector_at(emit, segment, loop.index)
        groups = [emit.load(emit.at(at, builder.mul(group_bytes, INT64(i))), INTS) for i in range(KEYS // GROUP)]
        sums = (_sums_of_limbs if knows_vnni() else _sums_of_shorts)(emit, weights, groups)
        for total, factor, out_at in zip(sums, factors, out, strict=True):
            target = vector_at(emit, out_at, loop.index)
            emit.store(emit.multiply_add(total, factor, emit.load(target, FLOATS)), target)


def _sums_of_limbs(emit: Emitter, weights: list[Value], groups: list[Value]) -> list[Value]:
    limbs = [emit.at(at, LANES * i) for at in weights for i in range(2)]
    totals = [constant(INTS, 0)] * len(limbs)
    for group, four_rows in enumerate(groups):
        for i, limb in enumerate(limbs):
            four = emit.splat(emit.load(emit.at(limb, GROUP * group), INT32, 1))
            totals[i] = emit.dot_bytes(totals[i], four, four_rows)
    return _joined(emit, totals)


def _sums_of_shorts(emit: Emitter, weights: list[Value], groups: list[Value]) -> list[Value]:
    totals = [constant(INTS, 0)] * len(weights)
    for group, four_rows in enumerate(groups):
        totals = _dot_shorts(emit, totals, [emit.at(at, 2 * GROUP * group) for at in weights], four_rows)
    return [emit.builder.sitofp(total, FLOATS) for total in totals]


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


def _round_weights(emit: Emitter, at: Value, scales: Value) -> Value:
    """Multiply 16 weights >= 0 by their values' scales and overwrite them with whole numbers: their high and low bytes,
    or, without VNNI, numbers of 16 bits in SHORTS_ORDER.

    Returns the factor of the sums.
    """
    builder = emit.builder
    most = _LIMB_LEVELS if knows_vnni() else _SHORT_LEVELS
    weights, nothing = emit.load(at, FLOATS), constant(INTS, 0)
    # Not every weight of 0 times its scale: that of a hidden token, such as a draft, may be NaN.
    is_hidden = builder.icmp_signed("==", builder.bitcast(weights, INTS), nothing)
    scaled = builder.select(is_hidden, builder.bitcast(nothing, FLOATS), builder.fmul(weights, scales))
    bits = builder.and_(builder.bitcast(scaled, INTS), constant(INTS, 0x7FFFFFFF))  # as in `largest_of`
    bits = emit.call("llvm.smax.v16i32", INTS, bits, constant(INTS, TINY_BITS))
    largest = builder.bitcast(emit.call("llvm.vector.reduce.smax.v16i32", INT32, bits), FLOAT)
    levels = emit.rounded(builder.fmul(scaled, emit.splat(builder.fdiv(FLOAT(most), largest))))
    if knows_vnni():
        for i, limb in enumerate((builder.lshr(levels, constant(INTS, 8)), levels)):
            emit.store(builder.trunc(limb, BYTES), emit.at(at, LANES * i), 1)
    else:
        emit.store(shorts_of(emit, levels), at, 1)
    return emit.splat(builder.fdiv(largest, FLOAT(most)))


select_by_dtype(prepare_queries, {types.int8: _split_queries if knows_vnni() else _short_queries}, _plain_queries)
