"""Activations of MLPs, over rows of fp32 numbers.

The vector loops take addresses, and bounds are not checked. Each has a loop for every activation, one of which runs.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np
from numba import types

from engine.kernels.cpu.arguments import (
    CLAMPED_SWIGLU,
    GELU,
    GELU_TANH,
    RELU,
    RELU2,
    SILU,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    XIELU,
    Floats,
    Range,
)
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.compilation.emitter import (
    FLOATS,
    INT64,
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
    gated_silu,
    sigmoid_of,
)
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES, LOG2_E, VECTOR_BYTES
from engine.kernels.cpu.vectors import address

_INTP = types.intp
_ONE, _MAX_EXPONENT = np.float32(1.0), np.float32(80.0)
_CUBE, _TANH_FACTOR = 0.044715, 2.0 * math.sqrt(2.0 / math.pi)
# Abramowitz and Stegun 1964, 7.1.26: erfc(x) = (a1 t + ... + a5 t^5) e^(-x^2), t = 1 / (1 + p x), within 1.5e-7.
_ERFC_P, _ERFC_A = 0.3275911, (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def _gelu_tanh(emit: Emitter, x: Value) -> Value:
    """x (1 + tanh(y)) / 2 = x / (1 + e^-2y), with y = sqrt(2 / pi) (x + 0.044715 x^3)."""
    builder = emit.builder
    square = builder.fmul(x, x)
    factor = emit.multiply_add(square, constant(FLOATS, _CUBE * _TANH_FACTOR), constant(FLOATS, _TANH_FACTOR))
    return sigmoid_of(emit, builder.fmul(x, factor), x)


def _gelu(emit: Emitter, x: Value) -> Value:
    """x (1 - erfc(x / sqrt 2) / 2) for x >= 0, x erfc(-x / sqrt 2) / 2 else."""
    builder = emit.builder
    magnitude = builder.fmul(emit.call("llvm.fabs.v16f32", FLOATS, x), constant(FLOATS, math.sqrt(0.5)))
    t = emit.reciprocal(emit.multiply_add(magnitude, constant(FLOATS, _ERFC_P), constant(FLOATS, 1.0)))
    polynomial = constant(FLOATS, _ERFC_A[0])
    for coefficient in _ERFC_A[1:]:
        polynomial = emit.multiply_add(polynomial, t, constant(FLOATS, coefficient))
    exponent = builder.fmul(builder.fmul(magnitude, magnitude), constant(FLOATS, -LOG2_E))
    half = builder.fmul(builder.fmul(polynomial, t), builder.fmul(emit.power_of_two(exponent), constant(FLOATS, 0.5)))
    is_negative = builder.fcmp_ordered("<", x, constant(FLOATS, 0.0))
    return builder.fmul(x, builder.select(is_negative, half, builder.fsub(constant(FLOATS, 1.0), half)))


def _clamped_swiglu(emit: Emitter, gate: Value, up: Value) -> Value:
    builder, limit = emit.builder, constant(FLOATS, SWIGLU_LIMIT)
    gate, up = (emit.call("llvm.minnum.v16f32", FLOATS, x, limit) for x in (gate, up))
    up = emit.call("llvm.maxnum.v16f32", FLOATS, up, constant(FLOATS, -SWIGLU_LIMIT))
    factor = builder.fmul(gate, builder.fadd(up, constant(FLOATS, 1.0)))
    return sigmoid_of(emit, builder.fmul(gate, constant(FLOATS, SWIGLU_ALPHA)), factor)


def _silu(emit: Emitter, x: Value) -> Value:
    return sigmoid_of(emit, x, x)


def _relu(emit: Emitter, x: Value) -> Value:
    return emit.call("llvm.maxnum.v16f32", FLOATS, x, constant(FLOATS, 0.0))


def _relu_squared(emit: Emitter, x: Value) -> Value:
    positive = _relu(emit, x)
    return emit.builder.fmul(positive, positive)


_ACTIVATIONS = {SILU: _silu, GELU: _gelu, GELU_TANH: _gelu_tanh, RELU: _relu, RELU2: _relu_squared}
_GATES = {SILU: gated_silu, CLAMPED_SWIGLU: _clamped_swiglu}
"""Activations of gates and ups. For others an up is multiplied with the activation of its gate."""


def _gated(emit: Emitter, activation: int, gate: Value, up: Value) -> Value:
    if activation in _GATES:
        return _GATES[activation](emit, gate, up)
    return emit.builder.fmul(_ACTIVATIONS[activation](emit, gate), up)


def _cases(builder: Builder, number: Value, numbers: Iterable[int]) -> Iterator[int]:
    """Yields these numbers. The code that is written before the next one runs if `number` is the one yielded."""
    end = builder.append_basic_block("end")
    switch = builder.switch(number, end)
    for each in numbers:
        block = builder.append_basic_block("case")
        switch.add_case(INT64(each), block)
        builder.position_at_end(block)
        yield each
        builder.branch(end)
    builder.position_at_end(end)


@emitted
def activate(typing: TypingContext, row: NumbaType, num_vectors: NumbaType, activation: NumbaType) -> Intrinsic:
    """row = activation(row) in place."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        at = emit.pointer(args[0])
        for number in _cases(builder, args[2], _ACTIVATIONS):
            with emit.loop(args[1], []) as loop:
                target = emit.vector_at(at, loop.index)
                emit.store(_ACTIVATIONS[number](emit, emit.load(target, FLOATS)), target)
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, types.int64), generate


@emitted
def activate_xielu(
    typing: TypingContext,
    row: NumbaType,
    num_vectors: NumbaType,
    alpha_p: NumbaType,
    alpha_n: NumbaType,
    beta: NumbaType,
    eps: NumbaType,
) -> Intrinsic:
    """xIELU in place (Huang and Schlag 2024): alpha_p x^2 + beta x for x > 0, alpha_n (e^min(x, eps) - 1 - x) + beta x
    else.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        at, (alpha_p, alpha_n, beta, eps) = emit.pointer(args[0]), (emit.splat(arg) for arg in args[2:])
        with emit.loop(args[1], []) as loop:
            target = emit.vector_at(at, loop.index)
            x = emit.load(target, FLOATS)
            exponent = builder.fmul(emit.call("llvm.minnum.v16f32", FLOATS, x, eps), constant(FLOATS, LOG2_E))
            power = builder.fsub(emit.power_of_two(exponent), constant(FLOATS, 1.0))
            is_positive = builder.fcmp_ordered(">", x, constant(FLOATS, 0.0))
            bent = builder.select(
                is_positive,
                builder.fmul(alpha_p, builder.fmul(x, x)),
                builder.fmul(alpha_n, builder.fsub(power, x)),
            )
            emit.store(emit.multiply_add(beta, x, bent), target)
        return context.get_dummy_value()

    floats = (types.float32,) * 4
    return types.void(_INTP, _INTP, *floats), generate


@emitted
def gate_panels(
    typing: TypingContext,
    gate_up: NumbaType,
    num_panels: NumbaType,
    out: NumbaType,
    before: NumbaType,
    behind: NumbaType,
    activation: NumbaType,
) -> Intrinsic:
    """behind * activation(before * gate) * up of one row; with factors 1, SILU to the bit as finish.GATE computes it.
    gate_up: panels of 16 gates and 16 ups alternate.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        gate_up_at, out_at, before, behind = (*map(emit.pointer, args[:3:2]), *map(emit.splat, args[3:5]))
        for number in _cases(builder, args[5], _ACTIVATIONS | _GATES):
            with emit.loop(args[1], []) as loop:
                at = emit.at(gate_up_at, builder.mul(loop.index, INT64(2 * VECTOR_BYTES)))
                gate, up = emit.load(at, FLOATS), emit.load(emit.at(at, VECTOR_BYTES), FLOATS)
                value = _gated(emit, number, builder.fmul(gate, before), builder.fmul(up, behind))
                emit.store(value, emit.vector_at(out_at, loop.index))
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, _INTP, types.float32, types.float32, types.int64), generate


@jit
def activate_rows(x: Floats, activation: int, parameters: Floats, own: Range) -> None:
    """x = activation(x) in place, for the rows of x [rows, width] in the range. parameters: of xIELU."""
    width = x.shape[1]
    for r in range(own.first, own.end):
        at = address(x) + r * width * FLOAT_BYTES
        if activation == XIELU:
            activate_xielu(at, width // LANES, parameters[0], parameters[1], parameters[2], parameters[3])
        else:
            activate(at, width // LANES, activation)


@jit
def gate_rows(
    gate_up: Floats, out: Floats, activation: int, before: np.float32, behind: np.float32, own: Range
) -> None:
    """behind * activation(before * gate) * up of the rows in the range: from gate_up [rows, 2 * width] to out
    [rows, width].
    """
    width = out.shape[1]
    for r in range(own.first, own.end):
        at, target = address(gate_up) + 2 * r * width * FLOAT_BYTES, address(out) + r * width * FLOAT_BYTES
        gate_panels(at, width // LANES, target, before, behind, activation)


@jit
def sigmoid(x: np.float32) -> np.float32:
    """1 / (1 + e^-x). The power stays finite: compiled code makes NaN of infinities."""
    return _ONE / (_ONE + np.exp(min(-x, _MAX_EXPONENT)))
