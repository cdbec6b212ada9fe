"""Vector loops of attention over a paged KV cache, and conversions between fp32 and the cache's rows.

A row of the cache is one head of one token: fp32, fp16 (arrays of uint16: numba has no fp16 on CPU), or int8 followed by
the 4 bytes of its fp32 scale. Rows have 16 * num_vectors numbers. A place is a tuple of an array and an offset; offsets
and steps count elements. Nothing is checked.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.ir import BYTES, FLOAT, FLOATS, HALVES, INT32, INT64, INTS, LANES, VOID, Emitter, constant

KEYS = 16
"""Keys that one call handles."""
_CACHE_LINE_BYTES = 64
_INT8_LEVELS = 127.0
_TINY = 1e-20
_emit: Callable[[Callable[..., Any]], Any] = intrinsic(prefer_literal=True)


def _width(place: Any) -> Any:
    """Bytes of 16 elements."""
    return INT64(LANES * place[0].dtype.bitwidth // 8)


@_emit
def read_row(typing: Any, row: Any, num_vectors: Any, out: Any) -> Any:
    """A row of the cache as fp32."""
    signature = types.void(row, types.intp, out)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        row_at, out_at, element = emit.place(row, args[0]), emit.place(out, args[2]), row[0].dtype
        scale = emit.splat(_scale(emit, row_at, args[1])) if element.bitwidth == 8 else None
        with emit.loop(args[1], []) as loop:
            values = emit.floats(emit.at(row_at, builder.mul(loop.index, _width(row))), element)
            if scale is not None:
                values = builder.fmul(values, scale)
            emit.store(values, emit.at(out_at, builder.mul(loop.index, _width(out))))
        return context.get_dummy_value()

    return signature, generate


@_emit
def write_row(typing: Any, values: Any, num_vectors: Any, row: Any) -> Any:
    """fp32 values as a row of the cache."""
    signature = types.void(values, types.intp, row)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        values_at, row_at, bits = emit.place(values, args[0]), emit.place(row, args[2]), row[0].dtype.bitwidth
        factor = emit.splat(_quantising_factor(emit, values_at, row_at, args[1])) if bits == 8 else None
        with emit.loop(args[1], []) as loop:
            read = emit.load(emit.at(values_at, builder.mul(loop.index, _width(values))), FLOATS)
            if bits == 16:
                read = builder.fptrunc(read, HALVES)
            elif bits == 8:
                rounded = emit.call("llvm.rint.v16f32", FLOATS, builder.fmul(read, factor))
                read = builder.trunc(builder.fptosi(rounded, INTS), BYTES)
            emit.store(read, emit.at(row_at, builder.mul(loop.index, _width(row))), bits // 8)
        return context.get_dummy_value()

    return signature, generate


def _quantising_factor(emit: Emitter, values_at: Any, row_at: Any, num_vectors: Any) -> Any:
    """Store the scale behind an int8 row; returns what values are multiplied with."""
    with emit.loop(num_vectors, [constant(FLOATS, _TINY)]) as loop:
        read = emit.load(emit.at(values_at, emit.builder.mul(loop.index, INT64(64))), FLOATS)
        magnitude = emit.call("llvm.fabs.v16f32", FLOATS, read)
        loop.next.append(emit.call("llvm.maxnum.v16f32", FLOATS, loop.carried[0], magnitude))
    largest = emit.call("llvm.vector.reduce.fmax.v16f32", FLOAT, loop.next[0])
    emit.store(emit.builder.fdiv(largest, FLOAT(_INT8_LEVELS)), _scale_at(emit, row_at, num_vectors), 1)
    return emit.builder.fdiv(FLOAT(_INT8_LEVELS), largest)


def _scale_at(emit: Emitter, row_at: Any, num_vectors: Any) -> Any:
    return emit.at(row_at, emit.builder.mul(num_vectors, INT64(LANES)))


def _scale(emit: Emitter, row_at: Any, num_vectors: Any) -> Any:
    """Of an int8 row."""
    return emit.load(_scale_at(emit, row_at, num_vectors), FLOAT, 1)


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
        sums = _sums(builder, loop.next)
        if element.bitwidth == 8:
            scales = ir.Constant(FLOATS, ir.Undefined)
            for key, row in enumerate(rows):
                scales = builder.insert_element(scales, _scale(emit, row, args[3]), INT32(key))
            sums = builder.fmul(sums, scales)
        emit.store(sums, out_at)
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
        rows = [emit.at(values_at, builder.mul(step, INT64(key))) for key in range(KEYS)]
        factors = [emit.load(emit.at(weights_at, 4 * key), FLOAT) for key in range(KEYS)]
        if element.bitwidth == 8:
            factors = [builder.fmul(f, _scale(emit, row, args[3])) for f, row in zip(factors, rows, strict=True)]
        factors = [emit.splat(factor) for factor in factors]
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
        num_lines = builder.udiv(emit.bytes_of(rows[0], args[2]), INT64(_CACHE_LINE_BYTES))
        with emit.loop(num_lines, []) as loop:
            line = builder.mul(loop.index, INT64(_CACHE_LINE_BYTES))
            for key in range(KEYS):
                row = emit.at(at, builder.add(line, builder.mul(step, INT64(key))))
                emit.call("llvm.prefetch.p0", VOID, row, INT32(0), INT32(3), INT32(1))
        return context.get_dummy_value()

    return signature, generate
