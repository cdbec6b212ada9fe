"""Vector loops of decode attention: 16 keys or values of the cache against the query rows that share them.

A row of the cache is read and converted once for up to MAX_QUERY_ROWS query rows. Arguments are as in `vectors.py`.
`num_rows` is a compile-time constant. Keys and values in int8 are
multiplied as bytes (see `kv_segments.py`).
"""

from typing import NamedTuple

from llvmlite import ir
from numba import types

from engine.kernels.cpu.arguments import Address
from engine.kernels.cpu.compiler import (
    BYTES,
    FLOAT,
    FLOATS,
    INT32,
    INT64,
    INTS,
    TINY,
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
from engine.kernels.cpu.kv_segments import SIGN_BITS, scales_at, vector_at
from engine.kernels.cpu.machine import (
    GROUP,
    KEYS,
    LANES,
    VECTOR_BYTES,
    knows_avx512,
)

_HALF = KEYS // 2
_WEIGHT_LEVELS = 65535.0
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


@emitted
def score_keys(
    typing: TypingContext, queries: NumbaType, keys: NumbaType, out: NumbaType, num_rows: NumbaType, element: NumbaType
) -> Intrinsic:
    """out[row][0:16] = dot products of each query row with 16 keys.

    queries: a Matrix of rows as `kv_segments.prepare_queries` returns it; keys: CacheRows; out: a Matrix.
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


def _joined(emit: Emitter, high: Value, low: Value) -> Value:
    """256 * high + low of int32 vectors, as fp32."""
    builder = emit.builder
    return emit.multiply_add(builder.sitofp(high, FLOATS), constant(FLOATS, 256.0), builder.sitofp(low, FLOATS))


def score_bytes(emit: Emitter, queries: list[Value], keys: tuple[Value, Value], out: list[Value]) -> None:
    """out[row][0:16] = dot products of each split query with 16 keys. keys: (segment, vectors of a row)."""
    builder, (segment, num_vectors) = emit.builder, keys
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
    scales = emit.load(scales_at(emit, segment, num_vectors), FLOATS)
    for row, at in enumerate(out):
        emit.store(builder.fmul(_joined(emit, *loop.next[2 * row : 2 * row + 2]), scales), at)


def add_bytes(emit: Emitter, weights: list[Value], values: tuple[Value, Value], out: list[Value]) -> None:
    """out[row] += sum over 16 tokens of weights[row][token] * value row. values: (segment, vectors of a row).

    The weights are overwritten with their limbs.
    """
    builder, (segment, num_vectors) = emit.builder, values
    scales = emit.load(scales_at(emit, segment, num_vectors), FLOATS)
    factors = [_split_weights(emit, at, scales) for at in weights]
    limbs = [emit.at(at, LANES * i) for at in weights for i in range(2)]
    group_bytes = builder.mul(num_vectors, INT64(VECTOR_BYTES))
    with emit.loop(num_vectors, []) as loop:
        at = vector_at(emit, segment, loop.index)
        totals = [constant(INTS, 0)] * len(limbs)
        for group in range(KEYS // GROUP):
            four_rows = emit.load(emit.at(at, builder.mul(group_bytes, INT64(group))), INTS)
            for i, limb in enumerate(limbs):
                four = emit.splat(emit.load(emit.at(limb, GROUP * group), INT32, 1))
                totals[i] = emit.dot_bytes(totals[i], four, four_rows)
        for row, (factor, out_at) in enumerate(zip(factors, out, strict=True)):
            target = vector_at(emit, out_at, loop.index)
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
