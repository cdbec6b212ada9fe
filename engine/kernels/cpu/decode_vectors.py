"""Vector loops of decode attention: 16 keys or values of the cache against the query rows that share them.

A row of the cache is read and converted once for up to MAX_QUERY_ROWS query rows. Arguments are as in `vectors.py`.
`num_rows` and `fetches` are compile-time constants. KV in int8 has loops of its own, see `decode_bytes.py`.

Loops whose `fetches` is 1, which is for the first rows, ask for memory that is read soon, a cache line for each that
they read. Many lines at once would wait for each other, and the code behind them for all.
"""

from typing import NamedTuple

from llvmlite import ir
from numba import types

from engine.kernels.cpu.arguments import Address, Element
from engine.kernels.cpu.compiler import (
    FLOAT,
    FLOATS,
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
    constant,
    emitted,
)
from engine.kernels.cpu.decode_bytes import KNOWS_PAIRS, Segment, add_bytes, score_bytes
from engine.kernels.cpu.machine import (
    CACHE_LINE_BYTES,
    KEYS,
    LANES,
    VECTOR_BYTES,
    knows_avx512,
)
from engine.kernels.cpu.parts import select_by_dtype

MAX_QUERY_ROWS = 4 if knows_avx512() else 3
"""Maximum query rows that share one read of the cache."""
_HALF = KEYS // 2
_IN_ORDER = [*range(0, KEYS, 2), *range(1, KEYS, 2)]


class CacheRows(NamedTuple):
    """16 rows of one head in the cache: the address of the first, bytes from row to row, vectors of a row, and the
    address of as many bytes that are prefetched meanwhile.
    """

    address: Address
    step: int
    num_vectors: int
    ahead: Address


class KeyRows(NamedTuple):
    """Keys of one head in two segments. The scores of the second ones lie `apart` bytes further. Both may be the same
    segment, 0 bytes apart.
    """

    first: CacheRows
    second: CacheRows
    apart: int


class _Cache:
    """`CacheRows` as LLVM values, while code is written."""

    def __init__(self, emit: Emitter, rows: Value, element: NumbaType, *, fetches: bool) -> None:
        address, step, self.num_vectors, ahead = emit.members(rows, 4)
        self._emit, self._element, self._ahead = emit, element, emit.pointer(ahead)
        self._fetches, self._vector_bytes = fetches, LANES * element.bitwidth // 8
        self._rows = [emit.at(emit.pointer(address), emit.builder.mul(step, INT64(key))) for key in range(KEYS)]

    def floats(self, key: int, index: Value) -> Value:
        """Vector number `index` of the row of a key, as fp32."""
        column = self._emit.builder.mul(index, INT64(self._vector_bytes))
        return self._emit.floats(self._emit.at(self._rows[key], column), self._element)

    def prefetch(self, index: Value, keys: range) -> None:
        """Prefetch lines in order, as many as vector number `index` of some keys has in a loop over all keys."""
        per_line, builder = CACHE_LINE_BYTES // self._vector_bytes, self._emit.builder
        size = max(len(keys), per_line)  # one of two keys asks for the lines of both
        if not self._fetches or keys.start % size:
            return
        first = builder.add(builder.mul(self.num_vectors, INT64(keys.start)), builder.mul(index, INT64(size)))
        at = self._emit.at(self._ahead, builder.mul(first, INT64(self._vector_bytes)))
        for line in range(size // per_line):
            self._emit.prefetch(self._emit.at(at, line * CACHE_LINE_BYTES), to_l2=True)


def scores_pairs(element: Element) -> bool:
    """True if there is code for `score_pairs`."""
    raise NotImplementedError


def _scores_pairs(element: Element) -> bool:
    return KNOWS_PAIRS


def _scores_no_pairs(element: Element) -> bool:
    return False


@emitted
def score_keys(
    typing: TypingContext,
    queries: NumbaType,
    keys: NumbaType,
    out: NumbaType,
    num_rows: NumbaType,
    fetches: NumbaType,
    element: NumbaType,
) -> Intrinsic:
    """out[row][0:16] = dot products of each query row with 16 keys.

    queries: a Matrix of rows as `prepare_queries` returns it; keys: CacheRows; out: a Matrix.
    """
    rows, is_first = range(num_rows.literal_value), bool(fetches.literal_value)
    # Keys whose sums fit into the registers.
    num_keys = (_HALF if len(rows) < MAX_QUERY_ROWS else _HALF // 2) if knows_avx512() else 4 // len(rows)

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        query_rows, out_rows = (_row_pointers(emit, args[i], rows) for i in (0, 2))
        if element == types.int8:
            score_bytes(emit, query_rows, [_segment(emit, args[1], is_first)], [out_rows])
            return context.get_dummy_value()
        cache = _Cache(emit, args[1], element, fetches=is_first)
        sums: list[Value] = []  # of key 0 with each row, then of key 1
        for first in range(0, KEYS, num_keys):
            with emit.loop(cache.num_vectors, [constant(FLOATS, 0.0)] * (num_keys * len(rows))) as loop:
                column = builder.mul(loop.index, INT64(VECTOR_BYTES))
                left = [emit.load(emit.at(row, column), FLOATS) for row in query_rows]
                cache.prefetch(loop.index, range(first, first + num_keys))
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

    return types.void(queries, keys, out, num_rows, fetches, element), generate


@emitted
def score_pairs(
    typing: TypingContext,
    queries: NumbaType,
    keys: NumbaType,
    out: NumbaType,
    num_rows: NumbaType,
    fetches: NumbaType,
    element: NumbaType,
) -> Intrinsic:
    """As `score_keys`, for KeyRows. `out` has the scores of the first segment."""
    rows, is_first = range(num_rows.literal_value), bool(fetches.literal_value)

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        if element == types.int8 and KNOWS_PAIRS:
            query_rows, out_rows = (_row_pointers(emit, args[i], rows) for i in (0, 2))
            first, second, apart = emit.members(args[1], 3)
            segments, further = (
                [_segment(emit, each, is_first) for each in (first, second)],
                [emit.at(at, apart) for at in out_rows],
            )
            score_bytes(emit, query_rows, segments, [out_rows, further])
        return context.get_dummy_value()

    return types.void(queries, keys, out, num_rows, fetches, element), generate


def _row_pointers(emit: Emitter, matrix: Value, rows: range) -> list[Value]:
    pointer, step = emit.matrix(matrix)
    return [emit.at(pointer, emit.builder.mul(step, INT64(row))) for row in rows]


def _segment(emit: Emitter, rows: Value, fetches: bool) -> Segment:
    address, _, num_vectors, ahead = emit.members(rows, 4)
    return Segment(emit.pointer(address), num_vectors, emit.pointer(ahead) if fetches else None)


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
    fetches: NumbaType,
    element: NumbaType,
) -> Intrinsic:
    """out[row] += sum over 16 keys of weights[row][key] * value row.

    weights: a Matrix as `prepare_weights` leaves it; values: CacheRows; out: a Matrix.
    """
    rows, is_first = range(num_rows.literal_value), bool(fetches.literal_value)

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        weight_rows, out_rows = (_row_pointers(emit, args[i], rows) for i in (0, 2))
        if element == types.int8:
            add_bytes(emit, weight_rows, _segment(emit, args[1], is_first), out_rows)
            return context.get_dummy_value()
        cache = _Cache(emit, args[1], element, fetches=is_first)
        with emit.loop(cache.num_vectors, []) as loop:
            column = builder.mul(loop.index, INT64(VECTOR_BYTES))
            targets = [emit.at(row, column) for row in out_rows]
            totals = [[emit.load(target, FLOATS), constant(FLOATS, 0.0)] for target in targets]
            cache.prefetch(loop.index, range(KEYS))
            for key in range(KEYS):
                value = cache.floats(key, loop.index)
                for row in rows:
                    weight = emit.splat(emit.load(emit.at(weight_rows[row], 4 * key), FLOAT))
                    totals[row][key % 2] = emit.multiply_add(weight, value, totals[row][key % 2])
            for target, (even, odd) in zip(targets, totals, strict=True):
                emit.store(builder.fadd(even, odd), target)
        return context.get_dummy_value()

    return types.void(weights, values, out, num_rows, fetches, element), generate


select_by_dtype(scores_pairs, {types.int8: _scores_pairs}, _scores_no_pairs)
