"""Vector loops of decode attention: 16 keys or values of the cache against the query heads that share them, its group.

Up to MAX_QUERY_ROWS rows, one for each query head, share a read of the cache: of the rows that are left of a group, the
first ones are computed. There is code for each number of rows. Arguments are as in `vectors.py`. KV in int8 has loops
of its own, see `decode_bytes.py`.

Code that fetches, which is for a group's first rows, asks for memory that is read soon, a cache line for each that it
reads. Many lines at once would wait for each other, and the code behind them for all.
"""

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir
from numba import types

from engine.kernels.cpu.arguments import Address, Element
from engine.kernels.cpu.attention.decode_bytes import AT_ONCE, ByteHead, add_bytes, score_bytes
from engine.kernels.cpu.attention.kv_segments import scales_at
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.compilation.emitter import (
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
from engine.kernels.cpu.compilation.parts import select_by_dtype
from engine.kernels.cpu.machine import (
    CACHE_LINE_BYTES,
    FLOAT_BYTES,
    KEYS,
    LANES,
    VECTOR_BYTES,
    knows_avx512,
)

MAX_QUERY_ROWS = 4 if knows_avx512() else 3
"""Maximum query rows that share one read of the cache."""
NOTHING, IN_ORDER, BY_TOKEN = range(3)
"""How Ahead is prefetched: not at all, as bytes without gaps, or with the gaps between tokens."""
_HALF = KEYS // 2
_TOKEN_BITS = 48
_IN_ORDER = [*range(0, KEYS, 2), *range(1, KEYS, 2)]


class Ahead(NamedTuple):
    """The part of a later segment that is prefetched while rows are read: as many bytes, from byte number `first` of
    the rows of the thread's own heads.
    """

    address: Address  # of that byte, if no gap lies before it
    first: int
    tokens_per_byte: int  # as `tokens_per_byte` returns it
    gap: int  # bytes from the rows of a token to those of the next, which are other threads' heads


class CacheRows(NamedTuple):
    """16 rows of one head in the cache: the address of the first, bytes from row to row, and vectors of a row."""

    address: Address
    step: int
    num_vectors: int
    ahead: Ahead


@jit
def tokens_per_byte(token_bytes: int) -> int:
    """A factor by which a shift gives the token of a byte: a division for each line would take too long."""
    return (1 << _TOKEN_BITS) // token_bytes + 1


class KeyRows(NamedTuple):
    """Keys of one head in one or two segments: see `segments_at_once`. The scores of the second ones lie `apart` bytes
    further. One segment is both, 0 bytes apart.
    """

    first: CacheRows
    second: CacheRows
    apart: int


def segments_at_once(group: int, element: Element) -> int:
    """Segments, one or two, whose keys share the reads of queries in `score_keys`, for a group of this size."""
    raise NotImplementedError


def _segments_of_bytes(group: int, element: Element) -> int:
    # Arithmetic limits many query rows. With few, memory does, and it gives less to two segments at once.
    return AT_ONCE if group > MAX_QUERY_ROWS else 1


def _segments_of_floats(group: int, element: Element) -> int:
    return 1


def fetches_of(num_heads: int, num_kv_heads: int, element: Element) -> int:
    """How a thread fetches ahead that attends with some of all heads."""
    raise NotImplementedError


def _fetches_of_bytes(num_heads: int, num_kv_heads: int, element: Element) -> int:
    return IN_ORDER


def _fetches_of_floats(num_heads: int, num_kv_heads: int, element: Element) -> int:
    return IN_ORDER if num_heads == num_kv_heads else BY_TOKEN


select_by_dtype(segments_at_once, {types.int8: _segments_of_bytes}, _segments_of_floats)
select_by_dtype(fetches_of, {types.int8: _fetches_of_bytes}, _fetches_of_floats)


@emitted
def score_keys(
    typing: TypingContext,
    queries: NumbaType,
    keys: NumbaType,
    out: NumbaType,
    num_left: NumbaType,
    fetches: NumbaType,
    element: NumbaType,
) -> Intrinsic:
    """out[row][0:16] = dot products of each query row with 16 keys.

    queries: a Matrix of rows as `prepare_queries` returns it; keys: KeyRows; out: a Matrix, the scores of the first
    segment; num_left: rows that are left of the group; fetches: one of NOTHING, IN_ORDER and BY_TOKEN.
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

        return _write_cases(emit, args[3:], element, write, AT_ONCE if is_int8 else 1)

    return types.void(queries, keys, out, types.intp, types.intp, element), generate


@emitted
def add_values(
    typing: TypingContext,
    weights: NumbaType,
    values: NumbaType,
    out: NumbaType,
    num_left: NumbaType,
    fetches: NumbaType,
    element: NumbaType,
) -> Intrinsic:
    """out[row] += sum over 16 keys of weights[row][key] * value row.

    weights: a Matrix as `prepare_weights` leaves it; values: CacheRows; out: a Matrix; the others as in
    `score_keys`.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)

        def write(case: _Case) -> None:
            weight_rows, out_rows = (_row_pointers(emit, args[i], case.num_rows) for i in (0, 2))
            if element == types.int8:
                add_bytes(emit, weight_rows, _byte_head(emit, args[1], case), out_rows)
            else:
                _add_floats(emit, weight_rows, _FloatRows(emit, args[1], element, case), out_rows)

        return _write_cases(emit, args[3:], element, write)

    return types.void(weights, values, out, types.intp, types.intp, element), generate


class _Case(NamedTuple):
    """Rows, and segments of keys, that are computed at once, and what is fetched meanwhile."""

    num_rows: int
    num_segments: int
    fetches: int


def _write_cases(
    emit: Emitter, args: Values, element: NumbaType, write: Callable[[_Case], None], at_once: int = 1
) -> Value:
    """Write the code of all cases, of which that for `num_left` and `fetches` runs. `at_once`: segments of keys that a
    group of more than MAX_QUERY_ROWS shares the reads of queries for.
    """
    (num_left, fetches, *_), builder = args, emit.builder
    cases: list[_Case] = []
    for kind in (NOTHING, IN_ORDER) if element == types.int8 else (NOTHING, IN_ORDER, BY_TOKEN):
        for count in range(1, MAX_QUERY_ROWS + 2):  # the last one stands for all larger groups
            has_many = kind == NOTHING or count > MAX_QUERY_ROWS
            cases.append(_Case(min(count, MAX_QUERY_ROWS), at_once if has_many else 1, kind))
    count = emit.smaller(num_left, INT64(MAX_QUERY_ROWS + 1))
    number = builder.add(builder.mul(fetches, INT64(MAX_QUERY_ROWS + 1)), builder.sub(count, INT64(1)))

    emit.choose(number, cases, write)
    nothing: Value = emit.context.get_dummy_value()
    return nothing


def _row_pointers(emit: Emitter, matrix: Value, num_rows: int) -> list[Value]:
    pointer, step = emit.matrix(matrix)
    return [emit.at(pointer, emit.builder.mul(step, INT64(row))) for row in range(num_rows)]


def _byte_head(emit: Emitter, rows: Value, case: _Case) -> ByteHead:
    address, _, num_vectors, ahead = emit.members(rows, 4)
    at, ahead_at = emit.pointer(address), emit.pointer(emit.members(ahead, 1)[0])
    return ByteHead(at, scales_at(emit, at, num_vectors), num_vectors, ahead_at if case.fetches else None)


class _FloatRows:
    """CacheRows of fp32 or fp16, while code is written."""

    def __init__(self, emit: Emitter, rows: Value, element: NumbaType, case: _Case) -> None:
        address, step, self.num_vectors, self._ahead = emit.members(rows, 4)
        self._emit, self._element, self._vector_bytes = emit, element, LANES * element.bitwidth // 8
        self._rows = [emit.at(emit.pointer(address), emit.builder.mul(step, INT64(key))) for key in range(KEYS)]
        self._fetches = case.fetches

    def vector(self, key: int, index: Value) -> Value:
        """Vector number `index` of the row of a key, as fp32."""
        column = self._emit.builder.mul(index, INT64(self._vector_bytes))
        return self._emit.floats(self._emit.at(self._rows[key], column), self._element)

    def prefetch(self, index: Value, keys: range) -> None:
        """Prefetch lines in order, as many as vector number `index` of some keys has in a loop over all keys."""
        emit, builder, per_line = self._emit, self._emit.builder, CACHE_LINE_BYTES // self._vector_bytes
        size = max(len(keys), per_line)  # one of two keys asks for the lines of both
        if not self._fetches or keys.start % size:
            return
        address, first, tokens_per_byte, gap = emit.members(self._ahead, 4)
        before = builder.add(builder.mul(self.num_vectors, INT64(keys.start)), builder.mul(index, INT64(size)))
        before = builder.mul(before, INT64(self._vector_bytes))
        at = emit.at(emit.pointer(address), before)
        for start in range(0, size * self._vector_bytes, CACHE_LINE_BYTES):
            line = emit.at(at, start)
            if self._fetches == BY_TOKEN:
                byte = builder.add(builder.add(first, before), INT64(start))
                token = builder.lshr(builder.mul(byte, tokens_per_byte), INT64(_TOKEN_BITS))
                line = emit.at(line, builder.mul(token, gap))
            emit.prefetch(line, to_l2=True)


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
