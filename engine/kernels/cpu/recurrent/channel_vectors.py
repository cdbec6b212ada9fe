"""Vector loops of Mamba 1, over 16 channels at once. Arguments are addresses, steps count bytes, and bounds are not
checked.
"""

from typing import NamedTuple

from numba import types

from engine.kernels.cpu.arguments import Address
from engine.kernels.cpu.compilation.emitter import (
    FLOAT,
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
)
from engine.kernels.cpu.machine import FLOAT_BYTES, LOG2_E, VECTOR_BYTES

_INTP = types.intp
_ATANH = (0.28174656629562378, 0.27961418032646179, 0.40024852752685547, 0.66666316986083984, 2.0)
"""2 atanh(s) / s by powers of s^2 in [0, 1/9], highest first: fp32 constants, exact to 1e-8."""


class ChannelColumns(NamedTuple):
    """Some channels. A vector of 16 channels has `num_keys` vectors of state, and of rates times log2(e)."""

    state: Address
    rates: Address
    skips: Address
    num_keys: int


class ChannelToken(NamedTuple):
    """A token that changes these channels: each is multiplied by e^(step * rate), then key * step * value is added. The
    token then sees them.
    """

    steps: Address  # [channels]
    values: Address  # [channels]
    gates: Address  # [channels]
    keys: Address  # [num_keys]
    queries: Address  # [num_keys]
    result: Address  # [channels]; may be `steps`


@emitted
def scan_row(typing: TypingContext, columns: NumbaType, token: NumbaType, num_vectors: NumbaType) -> Intrinsic:
    """Let a token pass over `num_vectors` vectors of channels."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        state, rates, skips, num_keys = emit.members(args[0], 4)
        state_at, rates_at, skips_at = (emit.pointer(at) for at in (state, rates, skips))
        steps_at, values_at, gates_at, keys_at, queries_at, result_at = map(emit.pointer, emit.members(args[1], 6))
        with emit.loop(args[2], []) as vector:
            at = builder.mul(vector.index, INT64(VECTOR_BYTES))
            first = builder.mul(at, num_keys)
            step, value, skip = (emit.load(emit.at(row, at), FLOATS) for row in (steps_at, values_at, skips_at))
            added, own_state, own_rates = builder.fmul(step, value), emit.at(state_at, first), emit.at(rates_at, first)
            with emit.loop(num_keys, [builder.fmul(skip, value)]) as row:
                offset = builder.mul(row.index, INT64(FLOAT_BYTES))
                key, query = (emit.splat(emit.load(emit.at(each, offset), FLOAT)) for each in (keys_at, queries_at))
                offset = builder.mul(row.index, INT64(VECTOR_BYTES))
                decay = emit.power_of_two(builder.fmul(emit.load(emit.at(own_rates, offset), FLOATS), step))
                place = emit.at(own_state, offset)
                number = emit.multiply_add(key, added, builder.fmul(emit.load(place, FLOATS), decay))
                emit.store(number, place)
                row.next.append(emit.multiply_add(number, query, row.carried[0]))
            gate = emit.load(emit.at(gates_at, at), FLOATS)
            emit.store(gated_silu(emit, gate, row.next[0]), emit.at(result_at, at))
        return context.get_dummy_value()

    return types.void(columns, token, _INTP), generate


@emitted
def soften_row(
    typing: TypingContext, row: NumbaType, factor: NumbaType, biases: NumbaType, num_vectors: NumbaType
) -> Intrinsic:
    """row = softplus(factor * row + biases), log(1 + e^x), in place.

    log(1 + t) is 2 atanh(t / (2 + t)), with t = e^-|x|: small results are as exact as large ones.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        row_at, factor, biases_at = emit.pointer(args[0]), emit.splat(args[1]), emit.pointer(args[2])
        with emit.loop(args[3], []) as loop:
            at = builder.mul(loop.index, INT64(VECTOR_BYTES))
            place = emit.at(row_at, at)
            x = emit.multiply_add(emit.load(place, FLOATS), factor, emit.load(emit.at(biases_at, at), FLOATS))
            magnitude = emit.call("llvm.fabs.v16f32", FLOATS, x)
            power = emit.power_of_two(builder.fmul(magnitude, constant(FLOATS, -LOG2_E)))
            ratio = builder.fmul(power, emit.reciprocal(builder.fadd(power, constant(FLOATS, 2.0))))
            square, sum_of_powers = builder.fmul(ratio, ratio), constant(FLOATS, _ATANH[0])
            for coefficient in _ATANH[1:]:
                sum_of_powers = emit.multiply_add(sum_of_powers, square, constant(FLOATS, coefficient))
            positive = emit.call("llvm.maxnum.v16f32", FLOATS, x, constant(FLOATS, 0.0))
            emit.store(emit.multiply_add(ratio, sum_of_powers, positive), place)
        return context.get_dummy_value()

    return types.void(_INTP, types.float32, _INTP, _INTP), generate
