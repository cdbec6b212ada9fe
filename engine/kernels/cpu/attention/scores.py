"""Loops over the scores of one query: soft caps and ALiBi, the highest score, softmax weights, sinks.

Scores are fp32, one for each key from a whole vector of keys on. Arguments are addresses, and bounds are not checked.
"""

import numpy as np
from llvmlite import ir
from numba import types

from engine.kernels.cpu.arguments import HIDDEN, Address, AttentionMemory, HeadShape
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.compilation.emitter import (
    FLOAT,
    FLOATS,
    INT32,
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
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES, LOG2_E
from engine.kernels.cpu.vectors import is_nan, read_float

_INTP = types.intp
_MAXIMA = 4
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_TWICE_LOG2_E = 2.0 * LOG2_E
_MAX_POWER = np.float32(126.0)  # of two, in fp32


class _Row:
    """Scores of one query. Those in the range are visible to the query, the others are hidden."""

    def __init__(self, emit: Emitter, at: Value, num_vectors: Value, visible: Value) -> None:
        self._emit, self._at, self._num_vectors = emit, emit.pointer(at), num_vectors
        self._start, self._end = (emit.builder.extract_value(visible, i) for i in range(2))

    def at(self, index: Value) -> Value:
        return self._emit.vector_at(self._at, index)

    def hide(self, value: float) -> None:
        """Write code that sets hidden scores to `value`. It visits only the vectors at both ends of the row."""
        builder = self._emit.builder
        first_visible = builder.sdiv(builder.add(self._start, INT64(LANES - 1)), INT64(LANES))
        self._hide_in(INT64(0), first_visible, value)
        self._hide_in(builder.sdiv(self._end, INT64(LANES)), self._num_vectors, value)

    def _hide_in(self, first: Value, end: Value, value: float) -> None:
        emit, builder = self._emit, self._emit.builder
        count = builder.sub(end, first)
        with builder.if_then(builder.icmp_signed(">", count, INT64(0))), emit.loop(count, []) as loop:
            index = builder.add(first, loop.index)
            lane = emit.splat(builder.trunc(builder.mul(index, INT64(LANES)), INT32))
            lanes = builder.add(lane, ir.Constant(INTS, list(range(LANES))))
            start, end = (emit.splat(builder.trunc(bound, INT32)) for bound in (self._start, self._end))
            is_visible = builder.and_(builder.icmp_signed(">=", lanes, start), builder.icmp_signed("<", lanes, end))
            at = self.at(index)
            emit.store(builder.select(is_visible, emit.load(at, FLOATS), constant(FLOATS, value)), at)


@emitted
def highest_score(typing: TypingContext, scores: NumbaType, num_vectors: NumbaType, visible: NumbaType) -> Intrinsic:
    """The highest visible score, HIDDEN if there is none. Hidden scores become HIDDEN.

    `visible` is a pair (first, end) of scores, with 0 <= first and end <= 16 * num_vectors.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        row = _Row(emit, *args)
        row.hide(HIDDEN)
        last, three = builder.sub(args[1], INT64(1)), builder.add(args[1], INT64(_MAXIMA - 1))
        # Several maxima at once, because one would wait for itself. The last vector may count more than once.
        with emit.loop(builder.udiv(three, INT64(_MAXIMA)), [constant(FLOATS, HIDDEN)] * _MAXIMA) as loop:
            for i, carried in enumerate(loop.carried):
                index = builder.add(builder.mul(loop.index, INT64(_MAXIMA)), INT64(i))
                read = emit.load(row.at(emit.smaller(index, last)), FLOATS)
                loop.next.append(emit.call("llvm.maxnum.v16f32", FLOATS, carried, read))
        highest = loop.next[0]
        for other in loop.next[1:]:
            highest = emit.call("llvm.maxnum.v16f32", FLOATS, highest, other)
        return emit.call("llvm.vector.reduce.fmax.v16f32", FLOAT, highest)

    return types.float32(_INTP, _INTP, visible), generate


@emitted
def powers(
    typing: TypingContext,
    scores: NumbaType,
    num_vectors: NumbaType,
    visible: NumbaType,
    scale: NumbaType,
    peak: NumbaType,
) -> Intrinsic:
    """scores = 2^((scores - peak) * scale) in place for the visible scores, 0 for hidden ones; returns the sum.

    `highest_score` must have been called. Beside a score of `peak`, the sum does not depend on the number of hidden
    vectors: a prompt that is chunked differently has others.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        row, scale, peak = _Row(emit, *args[:3]), emit.splat(args[3]), emit.splat(args[4])
        with emit.loop(args[1], [constant(FLOATS, 0.0)]) as total:
            read = emit.load(row.at(total.index), FLOATS)
            power = emit.power_of_two(builder.fmul(builder.fsub(read, peak), scale))
            emit.store(power, row.at(total.index))
            total.next.append(emit.add_in_order(total.carried[0], power))
        row.hide(0.0)
        return emit.call("llvm.vector.reduce.fadd.v16f32", FLOAT, FLOAT(0.0), total.next[0])

    return types.float32(_INTP, _INTP, visible, types.float32, types.float32), generate


@emitted
def cap_row(
    typing: TypingContext, scores: NumbaType, num_vectors: NumbaType, scale: NumbaType, cap: NumbaType
) -> Intrinsic:
    """scores = cap * tanh(scores * scale / cap) in place; NaN stays."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        at, cap = emit.pointer(args[0]), emit.splat(args[3])
        scale = emit.splat(builder.fdiv(builder.fmul(args[2], FLOAT(_TWICE_LOG2_E)), args[3]))
        with emit.loop(args[1], []) as loop:
            target = emit.vector_at(at, loop.index)
            score = emit.load(target, FLOATS)
            exponent = emit.call("llvm.minnum.v16f32", FLOATS, builder.fmul(score, scale), constant(FLOATS, 126.0))
            share = emit.reciprocal(builder.fadd(emit.power_of_two(exponent), constant(FLOATS, 1.0)))
            tanh = builder.fsub(constant(FLOATS, 1.0), builder.fmul(share, constant(FLOATS, 2.0)))
            # The power would make a number of NaN.
            emit.store(builder.select(is_nan(emit, score), score, builder.fmul(tanh, cap)), target)
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, types.float32, types.float32), generate


@emitted
def _slope_row(
    typing: TypingContext,
    scores: NumbaType,
    num_vectors: NumbaType,
    scale: NumbaType,
    slope: NumbaType,
    first: NumbaType,
) -> Intrinsic:
    """scores[i] = scores[i] * scale + slope * (first + i) in place."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        at, scale, slope = emit.pointer(args[0]), emit.splat(args[2]), emit.splat(args[3])
        lanes = ir.Constant(INTS, list(range(LANES)))
        with emit.loop(args[1], []) as loop:
            target = emit.vector_at(at, loop.index)
            begin = builder.add(args[4], builder.mul(loop.index, INT64(LANES)))
            distance = builder.add(emit.splat(builder.trunc(begin, INT32)), lanes)
            bias = builder.fmul(builder.sitofp(distance, FLOATS), slope)
            emit.store(emit.multiply_add(emit.load(target, FLOATS), scale, bias), target)
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, types.float32, types.float32, _INTP), generate


@jit
def adjust_scores(
    scores: Address,
    num_vectors: int,
    scale: np.float32,
    head: int,
    first: int,
    shape: HeadShape,
    memory: AttentionMemory,
) -> np.float32:
    """Apply the model's soft cap and ALiBi to the scores of a query head; returns the factor that is left to apply,
    which is `scale` if the model has neither. `first`: position of the first key, from the query's on.
    """
    if shape.softcap > _ZERO:
        cap_row(scores, num_vectors, scale, shape.softcap)
        scale = _ONE
    if memory.slopes:
        _slope_row(scores, num_vectors, scale, read_float(memory.slopes + head * FLOAT_BYTES), first)
        scale = _ONE
    return scale


@jit
def sink_weight(head: int, peak: np.float32, memory: AttentionMemory) -> np.float32:
    """The weight that the sink of a query head adds to a sum of softmax weights, 0 without sinks. `peak`: the score, in
    powers of two, whose weight is 1.
    """
    if not memory.sinks:
        return _ZERO
    return np.exp2(min(read_float(memory.sinks + head * FLOAT_BYTES) - peak, _MAX_POWER))
