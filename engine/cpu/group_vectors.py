"""Vector loops of decode attention: 16 keys or values of the cache against the query rows that share them.

Each row of the cache is read, and converted, once for up to MAX_ROWS query rows. Arguments are as in `vectors.py`:
addresses, steps in bytes, `kind` any number of the cache's dtype; `num_rows` is a compile-time constant. What lies in
int8 is in `byte_vectors.py`.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.byte_vectors import add_bytes, score_bytes
from engine.cpu.ir import FLOAT, FLOATS, INT64, INTS, LANES, Emitter, constant
from engine.cpu.vectors import KEYS

MAX_ROWS = 3
_HALF = KEYS // 2
_VECTOR_BYTES = 64
_IN_ORDER = [*range(0, KEYS, 2), *range(1, KEYS, 2)]
_emit: Callable[[Callable[..., Any]], Any] = intrinsic(prefer_literal=True)


class _Cache:
    """16 rows of the cache; `keys`: (address, step, vectors of a row)."""

    def __init__(self, emit: Emitter, keys: Any, kind: Any) -> None:
        builder = emit.builder
        at, step, self.num_vectors = (builder.extract_value(keys, i) for i in range(3))
        self._emit, self._kind = emit, kind
        self._rows = [emit.at(emit.pointer(at), builder.mul(step, INT64(key))) for key in range(KEYS)]

    def floats(self, key: int, index: Any) -> Any:
        """Vector number `index` of a row."""
        column = self._emit.builder.mul(index, INT64(LANES * self._kind.bitwidth // 8))
        return self._emit.floats(self._emit.at(self._rows[key], column), self._kind)


@_emit
def score_keys(typing: Any, queries: Any, keys: Any, out: Any, num_rows: Any, kind: Any) -> Any:
    """out[row][0:16] = dot products of each query row with 16 keys.

    queries, as `parts.put_queries` puts them, and out: (address, step from row to row); keys: (address, step, vectors
    of a row).
    """
    rows = range(num_rows.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        query_rows, out_rows = (_rows(emit, args[i], rows) for i in (0, 2))
        if kind == types.int8:
            score_bytes(emit, query_rows, _part(emit, args[1]), out_rows)
            return context.get_dummy_value()
        cache = _Cache(emit, args[1], kind)
        halves = []
        for half in range(2):
            with emit.loop(cache.num_vectors, [constant(FLOATS, 0.0)] * (_HALF * len(rows))) as loop:
                column = builder.mul(loop.index, INT64(_VECTOR_BYTES))
                left = [emit.load(emit.at(row, column), FLOATS) for row in query_rows]
                for key in range(_HALF):
                    right = cache.floats(half * _HALF + key, loop.index)
                    for row in rows:
                        total = loop.carried[key * len(rows) + row]
                        loop.next.append(emit.multiply_add(left[row], right, total))
            halves.append([_fold(builder, loop.next[row :: len(rows)]) for row in rows])
        for row in rows:
            mixed = _merge(builder, halves[0][row], halves[1][row], 2)  # keys 0, 8, 1, 9, ...
            sums = builder.shuffle_vector(mixed, mixed, ir.Constant(INTS, _IN_ORDER))
            emit.store(sums, out_rows[row])
        return context.get_dummy_value()

    return types.void(queries, keys, out, num_rows, kind), generate


def _rows(emit: Emitter, place: Any, rows: range) -> list[Any]:
    at, step = emit.builder.extract_value(place, 0), emit.builder.extract_value(place, 1)
    return [emit.at(emit.pointer(at), emit.builder.mul(step, INT64(row))) for row in rows]


def _part(emit: Emitter, place: Any) -> tuple[Any, Any]:
    """A part of int8, and the vectors of a row."""
    return emit.pointer(emit.builder.extract_value(place, 0)), emit.builder.extract_value(place, 2)


def _fold(builder: Any, vectors: list[Any]) -> Any:
    """8 vectors to one: lanes 2 i and 2 i + 1 add up to the sum over the lanes of vector i."""
    size = LANES
    while len(vectors) > 1:
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors, size = [_merge(builder, low, high, size) for low, high in pairs], size // 2
    return vectors[0]


def _merge(builder: Any, low: Any, high: Any, size: int) -> Any:
    """Each segment of `size` lanes folded to half its width, those of `low` and of `high` by turns."""
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


@_emit
def add_values(typing: Any, weights: Any, values: Any, out: Any, num_rows: Any, kind: Any) -> Any:
    """out[row] += sum over 16 keys of weights[row][key] * value row; what the weights are afterwards is undefined.

    weights, out: (address, step from row to row); values: (address, step, vectors of a row).
    """
    rows = range(num_rows.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        weight_rows, out_rows = (_rows(emit, args[i], rows) for i in (0, 2))
        if kind == types.int8:
            add_bytes(emit, weight_rows, _part(emit, args[1]), out_rows)
            return context.get_dummy_value()
        cache = _Cache(emit, args[1], kind)
        with emit.loop(cache.num_vectors, []) as loop:
            column = builder.mul(loop.index, INT64(_VECTOR_BYTES))
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

    return types.void(weights, values, out, num_rows, kind), generate
