"""Vector loops of decode attention: 16 keys or values of the cache against the query heads that share them, its group.

Up to MAX_QUERY_ROWS rows, one for each query head, share a read of the cache. `rows` is a Range of a group's rows whose
end is the group's: the first ones of it, up to MAX_QUERY_ROWS, are computed. There is code for each number of rows.
Arguments are as in `vectors.py`. KV in int8 has loops of its own, see `decode_bytes.py`.

The code for a group's first rows asks for memory that is read soon, a cache line for each that it reads. Many lines at
once would wait for each other, and the code behind them for all.
"""

from collections.abc import Callable
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
from engine.kernels.cpu.decode_bytes import AT_ONCE, ByteHead, add_bytes, score_bytes
from engine.kernels.cpu.machine import (
    CACHE_LINE_BYTES,
    FLOAT_BYTES,
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
    """Keys of one head in one or two segments: see `segments_at_once`. The scores of the second ones lie `apart` bytes
    further. One segment is both, 0 bytes apart.
    """

    first: CacheRows
    second: CacheRows
    apart: int


def segments_at_once(group: int, element: Element) -> int:
    """Segments, one or two, whose keys share the reads of queries in `score_keys`, for a group of so many query heads."""
    raise NotImplementedError


def _segments_of_bytes(group: int, element: Element) -> int:
    # Arithmetic limits many query rows. With few, memory does, and it gives less to two segments at once.
    return AT_ONCE if group > MAX_QUERY_ROWS else 1


def _segments_of_floats(group: int, element: Element) -> int:
    return 1


select_by_dtype(segments_at_once, {types.int8: _segments_of_bytes}, _segments_of_floats)


@emitted
def score_keys(
    typing: TypingContext, queries: NumbaType, keys: NumbaType, out: NumbaType, rows: NumbaType, element: NumbaType
) -> Intrinsic:
    """out[row][0:16] = dot products of each query row with 16 keys.

    queries: a Matrix of rows as `prepare_queries` returns it; keys: KeyRows; out: a Matrix, the scores of the first
    segment.
    """
    is_int8 = element == types.int8

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        *keys, apart = emit.members(args[1], 3)

        def write(case: _Case) -> None:
            query_rows, out_rows = (_row_pointers(emit, args[i], case.num_rows) for i in (0, 2))
            if is_int8:
                segments = [_byte_head(emit, each, case) for each in keys[: case.num_segments]]
                further = [emit.at(at, apart) for at in out_rows]
                score_bytes(emit, query_rows, segments, [out_rows, further][: case.num_segments])
            else:
                _score_floats(emit, query_rows, _FloatRows(emit, keys[0], element, case), out_rows)

        return _write_cases(emit, args[3], AT_ONCE if is_int8 else 1, write)

    return types.void(queries, keys, out, rows, element), generate


@emitted
def add_values(
    typing: TypingContext, weights: NumbaType, values: NumbaType, out: NumbaType, rows: NumbaType, element: NumbaType
) -> Intrinsic:
    """out[row] += sum over 16 keys of weights[row][key] * value row.

    weights: a Matrix as `prepare_weights` leaves it; values: CacheRows; out: a Matrix.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)

        def write(case: _Case) -> None:
            weight_rows, out_rows = (_row_pointers(emit, args[i], case.num_rows) for i in (0, 2))
            if element == types.int8:
                add_bytes(emit, weight_rows, _byte_head(emit, args[1], case), out_rows)
            else:
                _add_floats(emit, weight_rows, _FloatRows(emit, args[1], element, case), out_rows)

        return _write_cases(emit, args[3], 1, write)

    return types.void(weights, values, out, rows, element), generate


class _Case(NamedTuple):
    """Rows, and segments of keys, that are computed at once; whether they are the first rows of a group, which ask for
    memory.
    """

    num_rows: int
    num_segments: int
    is_first: bool


def _write_cases(emit: Emitter, rows: Value, at_once: int, write: Callable[[_Case], None]) -> Value:
    """Write the code for each number of rows, of which that for `rows` runs. `at_once`: segments of keys that the rows
    of a group share if they are more than MAX_QUERY_ROWS.
    """
    builder, counts = emit.builder, range(1, MAX_QUERY_ROWS + 1)
    cases = [_Case(count, 1, True) for count in counts]
    cases.append(_Case(MAX_QUERY_ROWS, at_once, True))
    cases += [_Case(count, at_once, False) for count in counts]
    first, end = emit.members(rows, 2)
    of_first = emit.smaller(end, INT64(MAX_QUERY_ROWS + 1))
    left = emit.smaller(builder.sub(end, first), INT64(MAX_QUERY_ROWS))
    is_first = builder.icmp_signed("==", first, INT64(0))
    number = builder.select(is_first, of_first, builder.add(left, INT64(MAX_QUERY_ROWS + 1)))

    def write_and_return(case: _Case) -> Value:
        write(case)
        nothing: Value = emit.context.get_dummy_value()
        return nothing

    return emit.choose(builder.sub(number, INT64(1)), cases, write_and_return)


def _row_pointers(emit: Emitter, matrix: Value, num_rows: int) -> list[Value]:
    pointer, step = emit.matrix(matrix)
    return [emit.at(pointer, emit.builder.mul(step, INT64(row))) for row in range(num_rows)]


def _byte_head(emit: Emitter, rows: Value, case: _Case) -> ByteHead:
    address, _, num_vectors, ahead = emit.members(rows, 4)
    return ByteHead(emit.pointer(address), num_vectors, emit.pointer(ahead) if case.is_first else None)


class _FloatRows:
    """CacheRows of fp32 or fp16, while code is written."""

    def __init__(self, emit: Emitter, rows: Value, element: NumbaType, case: _Case) -> None:
        address, step, self.num_vectors, ahead = emit.members(rows, 4)
        self._emit, self._element, self._vector_bytes = emit, element, LANES * element.bitwidth // 8
        self._rows = [emit.at(emit.pointer(address), emit.builder.mul(step, INT64(key))) for key in range(KEYS)]
        self._ahead = emit.pointer(ahead) if case.is_first else None

    def vector(self, key: int, index: Value) -> Value:
        """Vector number `index` of the row of a key, as fp32."""
        column = self._emit.builder.mul(index, INT64(self._vector_bytes))
        return self._emit.floats(self._emit.at(self._rows[key], column), self._element)

    def prefetch(self, index: Value, keys: range) -> None:
        """Prefetch lines in order, as many as vector number `index` of some keys has in a loop over all keys."""
        per_line, builder = CACHE_LINE_BYTES // self._vector_bytes, self._emit.builder
        size = max(len(keys), per_line)  # one of two keys asks for the lines of both
        if self._ahead is None or keys.start % size:
            return
        first = builder.add(builder.mul(self.num_vectors, INT64(keys.start)), builder.mul(index, INT64(size)))
        at = self._emit.at(self._ahead, builder.mul(first, INT64(self._vector_bytes)))
        for line in range(size // per_line):
            self._emit.prefetch(self._emit.at(at, line * CACHE_LINE_BYTES), to_l2=True)


def _score_floats(emit: Emitter, queries: list[Value], keys: _FloatRows, out: list[Value]) -> None:
    """`score_keys` of rows at these pointers."""
    builder, num_rows = emit.builder, len(queries)
    # Keys whose sums fit into the registers.
    num_keys = (_HALF if num_rows < MAX_QUERY_ROWS else _HALF // 2) if knows_avx512() else 4 // num_rows
    sums: list[Value] = []  # of key 0 with each row, then of key 1
    for first in range(0, KEYS, num_keys):
        with emit.loop(keys.num_vectors, [constant(FLOATS, 0.0)] * (num_keys * num_rows)) as loop:
            column = builder.mul(loop.index, INT64(VECTOR_BYTES))
            left = [emit.load(emit.at(query, column), FLOATS) for query in queries]
            some_keys = range(first, first + num_keys)
            keys.prefetch(loop.index, some_keys)
            for i, key in enumerate(some_keys):
                right = keys.vector(key, loop.index)
                totals = loop.carried[i * num_rows : (i + 1) * num_rows]
                loop.next += [emit.multiply_add(x, right, total) for x, total in zip(left, totals, strict=True)]
        sums += loop.next
    for row, out_row in enumerate(out):
        of_row = sums[row::num_rows]
        low, high = _fold(builder, of_row[:_HALF]), _fold(builder, of_row[_HALF:])
        mixed = _merge(builder, low, high, 2)  # keys 0, 8, 1, 9, ...
        emit.store(builder.shuffle_vector(mixed, mixed, ir.Constant(INTS, _IN_ORDER)), out_row)


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


def _add_floats(emit: Emitter, weights: list[Value], values: _FloatRows, out: list[Value]) -> None:
    """`add_values` of rows at these pointers."""
    builder = emit.builder
    with emit.loop(values.num_vectors, []) as loop:
        column = builder.mul(loop.index, INT64(VECTOR_BYTES))
        targets = [emit.at(row, column) for row in out]
        totals = [[emit.load(target, FLOATS), constant(FLOATS, 0.0)] for target in targets]
        values.prefetch(loop.index, range(KEYS))
        for key in range(KEYS):
            value = values.vector(key, loop.index)
            for weights_at, of_row in zip(weights, totals, strict=True):
                weight = emit.splat(emit.load(emit.at(weights_at, key * FLOAT_BYTES), FLOAT))
                of_row[key % 2] = emit.multiply_add(weight, value, of_row[key % 2])
        for target, (even, odd) in zip(targets, totals, strict=True):
            emit.store(builder.fadd(even, odd), target)
