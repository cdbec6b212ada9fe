"""Vector loops of attention over a paged KV cache, and conversions between fp32 and the cache's fp16.

numba has no fp16 on CPU: such arrays are uint16 here. Rows are multiples of 16 elements. A place is a tuple of an array
and an offset; offsets and steps count elements. Nothing is checked.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.ir import FLOAT, FLOATS, HALVES, INT8, INT32, INT64, INTS, LANES, Emitter, constant, declare

KEYS = 16
"""Keys that one call handles."""
_CACHE_LINE_BYTES = 64
_emit: Callable[[Callable[..., Any]], Any] = intrinsic(prefer_literal=True)


def _width(place: Any) -> Any:
    """Bytes of 16 elements."""
    return INT64(LANES * place[0].dtype.bitwidth // 8)


@_emit
def store_floats(typing: Any, source: Any, target: Any, num_vectors: Any) -> Any:
    """Copy 16 * num_vectors elements, converting between fp32 and fp16 where the arrays differ."""
    signature = types.void(source, target, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        source_at, target_at = emit.place(source, args[0]), emit.place(target, args[1])
        with emit.loop(args[2], []) as loop:
            values = emit.floats(emit.at(source_at, builder.mul(loop.index, _width(source))), source[0].dtype)
            if target[0].dtype.bitwidth == 16:
                values = builder.fptrunc(values, HALVES)
            emit.store(values, emit.at(target_at, builder.mul(loop.index, _width(target))), 2)
        return context.get_dummy_value()

    return signature, generate


@_emit
def dot_keys(typing: Any, query: Any, keys: Any, key_step: Any, num_vectors: Any, out: Any) -> Any:
    """out[0:16] = dot products of one fp32 query row with 16 key rows, `key_step` apart."""
    signature = types.void(query, keys, types.intp, types.intp, out)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        query_at, keys_at, out_at = emit.place(query, args[0]), emit.place(keys, args[1]), emit.place(out, args[4])
        step, element = emit.bytes_of(keys[0], args[2]), keys[0].dtype
        rows = [emit.at(keys_at, builder.mul(step, INT64(key))) for key in range(KEYS)]
        with emit.loop(args[3], [constant(FLOATS, 0.0)] * KEYS) as loop:
            left = emit.load(emit.at(query_at, builder.mul(loop.index, INT64(64))), FLOATS)
            column = builder.mul(loop.index, _width(keys))
            for row, total in zip(rows, loop.carried, strict=True):
                loop.next.append(emit.multiply_add(left, emit.floats(emit.at(row, column), element), total))
        emit.store(_sums(builder, loop.next), out_at)
        return context.get_dummy_value()

    return signature, generate


def _sums(builder: Any, vectors: list[Any]) -> Any:
    """Lane i of the result is the sum over the lanes of vectors[i]: a tree of shuffles that adds pairs of vectors."""
    size = LANES
    while len(vectors) > 1:
        half = len(vectors) // 2
        merged = []
        for low, high in zip(vectors[:half], vectors[half:], strict=True):
            # Segments of `size` lanes belong to different vectors already; each is folded to half its width.
            pieces = [(start, start + size // 2) for start in range(0, LANES, size)]
            even = [lane for start, middle in pieces for lane in range(start, middle)]
            odd = [lane + size // 2 for lane in even]
            left = _gather(builder, low, high, even, size)
            right = _gather(builder, low, high, odd, size)
            merged.append(builder.fadd(left, right, flags=("fast",)))
        vectors, size = merged, size // 2
    return vectors[0]


def _gather(builder: Any, low: Any, high: Any, lanes: list[int], size: int) -> Any:
    """Lanes of `low` and the same of `high`, segment by segment, so that each keeps its segments in order."""
    half = size // 2
    mask: list[int] = []
    for start in range(0, len(lanes), half):
        segment = lanes[start : start + half]
        mask += segment + [lane + LANES for lane in segment]
    return builder.shuffle_vector(low, high, ir.Constant(INTS, mask))


@_emit
def add_values(typing: Any, weights: Any, values: Any, value_step: Any, num_vectors: Any, out: Any) -> Any:
    """out += sum over 16 keys of weights[key] * value row; `out` fp32."""
    signature = types.void(weights, values, types.intp, types.intp, out)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        weights_at, values_at, out_at = (emit.place(kind, args[i]) for kind, i in ((weights, 0), (values, 1), (out, 4)))
        step, element = emit.bytes_of(values[0], args[2]), values[0].dtype
        factors = [emit.broadcast(emit.at(weights_at, 4 * key), FLOAT, FLOATS) for key in range(KEYS)]
        rows = [emit.at(values_at, builder.mul(step, INT64(key))) for key in range(KEYS)]
        with emit.loop(args[3], []) as loop:
            target = emit.at(out_at, builder.mul(loop.index, INT64(64)))
            column = builder.mul(loop.index, _width(values))
            totals = [emit.load(target, FLOATS), constant(FLOATS, 0.0)]
            for key, row in enumerate(rows):
                read = emit.floats(emit.at(row, column), element)
                totals[key % 2] = emit.multiply_add(factors[key], read, totals[key % 2])
            emit.store(builder.fadd(totals[0], totals[1]), target)
        return context.get_dummy_value()

    return signature, generate


@_emit
def prefetch_rows(typing: Any, rows: Any, step: Any, width: Any) -> Any:
    """Ask for 16 rows of `width` elements, `step` apart, to be brought near; harmless wherever that is."""
    signature = types.void(rows, types.intp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        at, step = emit.place(rows, args[0]), emit.bytes_of(rows[0], args[1])
        kind = ir.FunctionType(ir.VoidType(), [INT8.as_pointer(), INT32, INT32, INT32])
        prefetch = declare(builder.module, kind, "llvm.prefetch.p0")
        num_lines = builder.udiv(emit.bytes_of(rows[0], args[2]), INT64(_CACHE_LINE_BYTES))
        with emit.loop(num_lines, []) as loop:
            line = builder.mul(loop.index, INT64(_CACHE_LINE_BYTES))
            for key in range(KEYS):
                row = emit.at(at, builder.add(line, builder.mul(step, INT64(key))))
                builder.call(prefetch, [row, INT32(0), INT32(3), INT32(1)])
        return context.get_dummy_value()

    return signature, generate
