"""Vector loops of attention over a paged KV cache, and conversions between fp32 and the cache's rows.

A row of the cache is one head of one token: fp32, or fp16 (arrays of uint16: numba has no fp16 on CPU); int8 is in
`byte_vectors.py`. `kind` is any number of the cache's dtype. Rows have 16 * num_vectors numbers.
Arguments without another word are addresses, and steps count bytes: arrays would be counted references in the innermost
loops. Nothing is checked.
"""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.ir import (
    BYTES,
    FLOAT,
    FLOATS,
    HALVES,
    INT32,
    INT64,
    INTS,
    LANES,
    LOG2_E,
    SHORTS,
    VOID,
    Emitter,
    constant,
)

ZERO_POINT = 128
"""What stands for 0 in unsigned bytes."""
KEYS = 16
"""Keys that one call handles."""
FLOAT_BYTES = 4
HALF_BYTES = 2
_VECTOR_BYTES = 64
_CACHE_LINE_BYTES = 64
INT8_LEVELS = 127.0
TINY = ir.Constant(FLOAT, 1e-20)
_INTP = types.intp
_emit: Callable[[Callable[..., Any]], Any] = intrinsic(prefer_literal=True)


@_emit
def address(typing: Any, array: Any) -> Any:
    """Of an array's first element."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(Emitter(context, builder).array(signature.args[0], args[0]), INT64)

    return types.intp(array), generate


@_emit
def largest_magnitude(typing: Any, values: Any, num_vectors: Any) -> Any:
    """The largest absolute value, at least a tiny one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return largest_of(Emitter(context, builder), args[0], args[1])

    return types.float32(_INTP, _INTP), generate


def largest_of(emit: Emitter, values: Any, num_vectors: Any) -> Any:
    """Write code that finds the largest absolute value, at least TINY."""
    at = emit.pointer(values)
    with emit.loop(num_vectors, [constant(FLOATS, TINY.constant)]) as loop:
        read = emit.load(emit.at(at, emit.builder.mul(loop.index, INT64(_VECTOR_BYTES))), FLOATS)
        magnitude = emit.call("llvm.fabs.v16f32", FLOATS, read)
        loop.next.append(emit.call("llvm.maxnum.v16f32", FLOATS, loop.carried[0], magnitude))
    return emit.call("llvm.vector.reduce.fmax.v16f32", FLOAT, loop.next[0])


@_emit
def quantise_vectors(typing: Any, values: Any, num_vectors: Any, factor: Any, out: Any) -> Any:
    """Unsigned bytes ZERO_POINT + round(value * factor)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        values_at, factor, out_at = emit.pointer(args[0]), emit.splat(args[2]), emit.pointer(args[3])
        with emit.loop(args[1], []) as loop:
            read = emit.load(emit.at(values_at, builder.mul(loop.index, INT64(_VECTOR_BYTES))), FLOATS)
            levels = builder.add(emit.rounded(builder.fmul(read, factor)), constant(INTS, ZERO_POINT))
            emit.store(builder.trunc(levels, BYTES), emit.at(out_at, builder.mul(loop.index, INT64(LANES))), 1)
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, types.float32, _INTP), generate


@_emit
def weigh_row(typing: Any, values: Any, weights: Any, num_vectors: Any, out: Any) -> Any:
    """out = values * weights, fp32; returns the sum of the values' squares."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        values_at, weights_at, out_at = (emit.pointer(args[i]) for i in (0, 1, 3))
        with emit.loop(args[2], [constant(FLOATS, 0.0)]) as loop:
            at = builder.mul(loop.index, INT64(_VECTOR_BYTES))
            read, weight = (emit.load(emit.at(row, at), FLOATS) for row in (values_at, weights_at))
            emit.store(builder.fmul(read, weight), emit.at(out_at, at))
            loop.next.append(emit.multiply_add(read, read, loop.carried[0]))
        return emit.call("llvm.vector.reduce.fadd.v16f32", FLOAT, FLOAT(0.0), loop.next[0])

    return types.float32(*[_INTP] * 4), generate


@_emit
def rotate_halves(typing: Any, heads: Any, num_heads: Any, cos: Any, sin: Any, num_vectors: Any) -> Any:
    """Rotate heads in place, their first halves of `num_vectors` against their second; see engine/models/rope.py."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        heads_at, *factors_at = (emit.pointer(args[i]) for i in (0, 2, 3))
        half = builder.mul(args[4], INT64(_VECTOR_BYTES))
        with emit.loop(args[4], []) as column:
            first = builder.mul(column.index, INT64(_VECTOR_BYTES))
            places = (first, builder.add(first, half))
            cos, sin = ([emit.load(emit.at(factors, at), FLOATS) for at in places] for factors in factors_at)
            with emit.loop(args[1], []) as head:
                at = emit.at(heads_at, builder.mul(head.index, builder.shl(half, INT64(1))))
                low, high = (emit.load(emit.at(at, place), FLOATS) for place in places)
                for i, (own, other) in enumerate(((low, high), (high, low))):
                    turned = emit.multiply_add(own, cos[i], builder.fmul(other, sin[i]))
                    emit.store(turned, emit.at(at, places[i]))
        return context.get_dummy_value()

    return types.void(*[_INTP] * 5), generate


@_emit
def read_rows(typing: Any, rows: Any, step: Any, num_vectors: Any, out: Any, kind: Any) -> Any:
    """16 rows of the cache as fp32, one behind the other."""
    bits = kind.bitwidth

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        rows_at, out_at = emit.pointer(args[0]), emit.pointer(args[3])
        rows = [emit.at(rows_at, builder.mul(args[1], INT64(key))) for key in range(KEYS)]
        out_step = builder.mul(args[2], INT64(_VECTOR_BYTES))
        with emit.loop(args[2], []) as loop:
            column = builder.mul(loop.index, INT64(LANES * bits // 8))
            target = emit.at(out_at, builder.mul(loop.index, INT64(_VECTOR_BYTES)))
            for key, row in enumerate(rows):
                values = emit.floats(emit.at(row, column), kind)
                emit.store(values, emit.at(target, builder.mul(out_step, INT64(key))))
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, _INTP, _INTP, kind), generate


@_emit
def write_row(typing: Any, values: Any, num_vectors: Any, row: Any, kind: Any) -> Any:
    """fp32 values as a row of the cache."""
    bits = kind.bitwidth

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        values_at, row_at = emit.pointer(args[0]), emit.pointer(args[2])
        with emit.loop(args[1], []) as loop:
            read = emit.load(emit.at(values_at, builder.mul(loop.index, INT64(_VECTOR_BYTES))), FLOATS)
            if bits == 16:
                read = builder.fptrunc(read, HALVES)
            emit.store(read, emit.at(row_at, builder.mul(loop.index, INT64(LANES * bits // 8))), bits // 8)
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, _INTP, kind), generate


@_emit
def to_bf16(typing: Any, values: Any, num_vectors: Any, out: Any) -> Any:
    """fp32 values as bf16, rounded to nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        values_at, out_at = emit.pointer(args[0]), emit.pointer(args[2])
        with emit.loop(args[1], []) as loop:
            read = emit.load(emit.at(values_at, builder.mul(loop.index, INT64(_VECTOR_BYTES))), FLOATS)
            half = emit.bf16(read)
            emit.store(half, emit.at(out_at, builder.mul(loop.index, INT64(_VECTOR_BYTES // 2))), 2)
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, _INTP), generate


@_emit
def pair_rows(typing: Any, low: Any, high: Any, num_vectors: Any, out: Any, out_step: Any) -> Any:
    """Two rows of 16-bit numbers, interleaved; vectors of 16 pairs go to places `out_step` apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        low_at, high_at, out_at = (emit.pointer(args[i]) for i in (0, 1, 3))
        mask = ir.Constant(ir.VectorType(INT32, 2 * LANES), [lane for i in range(LANES) for lane in (i, LANES + i)])
        with emit.loop(args[2], []) as loop:
            at = builder.mul(loop.index, INT64(_VECTOR_BYTES // 2))
            rows = [emit.load(emit.at(row, at), SHORTS, 2) for row in (low_at, high_at)]
            pairs = builder.shuffle_vector(*rows, mask)
            emit.store(pairs, emit.at(out_at, builder.mul(loop.index, args[4])), 2)
        return context.get_dummy_value()

    return types.void(*[_INTP] * 5), generate


class _Row:
    """Scores of one query, of which those in [span[0], span[1]) count."""

    def __init__(self, emit: Emitter, at: Any, num_vectors: Any, span: Any) -> None:
        self._emit, self._at, self._num_vectors = emit, emit.pointer(at), num_vectors
        self._start, self._end = (emit.builder.extract_value(span, i) for i in range(2))

    def at(self, index: Any) -> Any:
        """Where a vector is."""
        return self._emit.at(self._at, self._emit.builder.mul(index, INT64(_VECTOR_BYTES)))

    def hide(self, value: float) -> None:
        """Write code that sets those that do not count: only the row's ends are looked at."""
        builder = self._emit.builder
        whole = builder.sdiv(builder.add(self._start, INT64(LANES - 1)), INT64(LANES))
        self._hide_in(INT64(0), whole, value)
        self._hide_in(builder.sdiv(self._end, INT64(LANES)), self._num_vectors, value)

    def _hide_in(self, first: Any, end: Any, value: float) -> None:
        emit, builder = self._emit, self._emit.builder
        count = builder.sub(end, first)
        with builder.if_then(builder.icmp_signed(">", count, INT64(0))), emit.loop(count, []) as loop:
            index = builder.add(first, loop.index)
            lane = emit.splat(builder.trunc(builder.mul(index, INT64(LANES)), INT32))
            lanes = builder.add(lane, ir.Constant(INTS, list(range(LANES))))
            start, end = (emit.splat(builder.trunc(bound, INT32)) for bound in (self._start, self._end))
            counts = builder.and_(builder.icmp_signed(">=", lanes, start), builder.icmp_signed("<", lanes, end))
            at = self.at(index)
            emit.store(builder.select(counts, emit.load(at, FLOATS), constant(FLOATS, value)), at)


@_emit
def exponents(typing: Any, scores: Any, num_vectors: Any, span: Any, scale: Any) -> Any:
    """scores = 2^((scores - their largest) * scale), in place, for those in [span[0], span[1]), which are not none; 0
    for the others. Returns their sum.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        row, scale = _Row(emit, args[0], args[1], args[2]), emit.splat(args[3])
        row.hide(float("-inf"))
        with emit.loop(args[1], [constant(FLOATS, float("-inf"))]) as highest:
            read = emit.load(row.at(highest.index), FLOATS)
            highest.next.append(emit.call("llvm.maxnum.v16f32", FLOATS, highest.carried[0], read))
        largest = emit.splat(emit.call("llvm.vector.reduce.fmax.v16f32", FLOAT, highest.next[0]))
        with emit.loop(args[1], [constant(FLOATS, 0.0)]) as total:
            read = emit.load(row.at(total.index), FLOATS)
            power = emit.power_of_two(builder.fmul(builder.fsub(read, largest), scale))
            emit.store(power, row.at(total.index))
            total.next.append(builder.fadd(total.carried[0], power))
        row.hide(0.0)
        return emit.call("llvm.vector.reduce.fadd.v16f32", FLOAT, FLOAT(0.0), total.next[0])

    return types.float32(_INTP, _INTP, span, types.float32), generate


@_emit
def scale_row(typing: Any, values: Any, num_vectors: Any, factor: Any, out: Any) -> Any:
    """out = values * factor, fp32; the two may be the same."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        values_at, factor, out_at = emit.pointer(args[0]), emit.splat(args[2]), emit.pointer(args[3])
        with emit.loop(args[1], []) as loop:
            at = builder.mul(loop.index, INT64(_VECTOR_BYTES))
            emit.store(builder.fmul(emit.load(emit.at(values_at, at), FLOATS), factor), emit.at(out_at, at))
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, types.float32, _INTP), generate


@_emit
def prefetch(typing: Any, at: Any, num_bytes: Any) -> Any:
    """Ask for memory to be brought near; harmless wherever that is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        at = emit.pointer(args[0])
        with emit.loop(builder.udiv(args[1], INT64(_CACHE_LINE_BYTES)), []) as loop:
            line = emit.at(at, builder.mul(loop.index, INT64(_CACHE_LINE_BYTES)))
            emit.call("llvm.prefetch.p0", VOID, line, INT32(0), INT32(2), INT32(1))
        return context.get_dummy_value()

    return types.void(_INTP, _INTP), generate


@_emit
def index_of_largest(typing: Any, values: Any, num_vectors: Any) -> Any:
    """Where the largest value is, the first of equal ones; NaNs count as smallest. There is at least one vector."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        at, lanes = emit.pointer(args[0]), ir.Constant(INTS, list(range(LANES)))
        with emit.loop(args[1], [constant(FLOATS, -math.inf), constant(INTS, 0)]) as loop:
            read = emit.load(emit.at(at, builder.mul(loop.index, INT64(_VECTOR_BYTES))), FLOATS)
            here = builder.add(emit.splat(builder.trunc(builder.mul(loop.index, INT64(LANES)), INT32)), lanes)
            is_larger = builder.fcmp_ordered(">", read, loop.carried[0])
            loop.next.append(builder.select(is_larger, read, loop.carried[0]))
            loop.next.append(builder.select(is_larger, here, loop.carried[1]))
        values, places = loop.next
        largest = emit.splat(emit.call("llvm.vector.reduce.fmax.v16f32", FLOAT, values))
        is_largest = builder.fcmp_ordered("==", values, largest)
        places = builder.select(is_largest, places, constant(INTS, 2**31 - 1))
        return builder.zext(emit.call("llvm.vector.reduce.umin.v16i32", INT32, places), INT64)

    return types.intp(_INTP, _INTP), generate


@_emit
def sum_of_exponents(typing: Any, values: Any, num_vectors: Any, largest: Any) -> Any:
    """The sum of e^(value - largest), fp32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        at, largest = emit.pointer(args[0]), emit.splat(args[2])
        with emit.loop(args[1], [constant(FLOATS, 0.0)]) as total:
            read = emit.load(emit.at(at, builder.mul(total.index, INT64(_VECTOR_BYTES))), FLOATS)
            power = emit.power_of_two(builder.fmul(builder.fsub(read, largest), constant(FLOATS, LOG2_E)))
            total.next.append(builder.fadd(total.carried[0], power))
        return emit.call("llvm.vector.reduce.fadd.v16f32", FLOAT, FLOAT(0.0), total.next[0])

    return types.float32(_INTP, _INTP, types.float32), generate
