"""Vector loops of recurrent layers, over rows of fp32 numbers.

Arguments are addresses, steps count bytes, and bounds are not checked. Rows have whole vectors of 16 numbers.
"""

from typing import NamedTuple

import numpy as np
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
    sigmoid_of,
)
from engine.kernels.cpu.machine import FLOAT_BYTES, VECTOR_BYTES

_INTP = types.intp


class Taps(NamedTuple):
    """The weights of a convolution of some channels: rows of them, the oldest input's first, and their biases."""

    weights: Address
    step: int  # from row to row
    biases: Address


class HeadMatrix(NamedTuple):
    """Vectors of 16 columns of a head's matrix: the rows of a column of vectors follow each other."""

    address: Address
    num_rows: int
    step: int  # from a column of vectors to the next


class Change(NamedTuple):
    """The effect of a token on some columns: each is multiplied by the decay, then key * change is added."""

    decay: np.float32
    key: Address  # [rows]
    change: Address  # [columns]


class Seen(NamedTuple):
    """A token that sees some columns. Its change of them and its result are written."""

    decay: np.float32
    strength: np.float32
    product: np.float32  # of query and key
    key: Address  # [rows]
    query: Address  # [rows]
    values: Address  # [columns]
    result: Address  # [columns]


class Scanned(NamedTuple):
    """A token of Mamba 2 that changes some columns and then sees them: each is multiplied by the decay, then
    key * step * values is added. The token then sees the columns, and that is added to its result.
    """

    decay: np.float32
    step: np.float32
    key: Address  # [rows]
    query: Address  # [rows]
    values: Address  # [columns]
    result: Address  # [columns]


@emitted
def copy_vectors(
    typing: TypingContext,
    source: NumbaType,
    source_step: NumbaType,
    num_vectors: NumbaType,
    out: NumbaType,
    out_step: NumbaType,
) -> Intrinsic:
    """Copy vectors that are `source_step` bytes apart to places that are `out_step` apart."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        source_at, out_at = emit.pointer(args[0]), emit.pointer(args[3])
        with emit.loop(args[2], []) as loop:
            vector = emit.load(emit.at(source_at, builder.mul(loop.index, args[1])), FLOATS)
            emit.store(vector, emit.at(out_at, builder.mul(loop.index, args[4])))
        return context.get_dummy_value()

    return types.void(*[_INTP] * 5), generate


@emitted
def dot_rows(typing: TypingContext, left: NumbaType, right: NumbaType, num_vectors: NumbaType) -> Intrinsic:
    """The sum of the products of two rows."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        rows = [emit.pointer(args[0]), emit.pointer(args[1])]
        with emit.loop(args[2], [constant(FLOATS, 0.0)]) as loop:
            at = builder.mul(loop.index, INT64(VECTOR_BYTES))
            left, right = (emit.load(emit.at(row, at), FLOATS) for row in rows)
            loop.next.append(emit.multiply_add(left, right, loop.carried[0]))
        return emit.call("llvm.vector.reduce.fadd.v16f32", FLOAT, FLOAT(0.0), loop.next[0])

    return types.float32(*[_INTP] * 3), generate


@emitted
def gate_row(
    typing: TypingContext,
    row: NumbaType,
    gates: NumbaType,
    num_vectors: NumbaType,
    factor: NumbaType,
    is_silu: NumbaType,
) -> Intrinsic:
    """row *= factor * silu(gates), or factor * sigmoid(gates). `is_silu` is a compile-time constant: 0 or 1."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        row_at, gates_at, factor = emit.pointer(args[0]), emit.pointer(args[1]), emit.splat(args[3])
        with emit.loop(args[2], []) as loop:
            at = builder.mul(loop.index, INT64(VECTOR_BYTES))
            target, gate = emit.at(row_at, at), emit.load(emit.at(gates_at, at), FLOATS)
            value = builder.fmul(emit.load(target, FLOATS), factor)
            gated = gated_silu(emit, gate, value) if is_silu.literal_value else sigmoid_of(emit, gate, value)
            emit.store(gated, target)
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, _INTP, types.float32, is_silu), generate


@emitted
def convolve(
    typing: TypingContext,
    inputs: NumbaType,
    taps: NumbaType,
    past: NumbaType,
    num_past: NumbaType,
    num_vectors: NumbaType,
    out: NumbaType,
) -> Intrinsic:
    """One token of a causal convolution of each channel. past: the inputs before, [num_past, channels], the oldest
    first, which make room for the token's; one row more is read. `out` may be `inputs`.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        weights, tap_step, biases = emit.members(args[1], 3)
        taps_at, bias_at = emit.pointer(weights), emit.pointer(biases)
        inputs_at, past_at, out_at = (emit.pointer(args[i]) for i in (0, 2, 5))
        num_past, past_step = args[3], builder.mul(args[4], INT64(VECTOR_BYTES))
        with emit.loop(args[4], []) as column:
            first = builder.mul(column.index, INT64(VECTOR_BYTES))
            taps, past = emit.at(taps_at, first), emit.at(past_at, first)
            read = emit.load(emit.at(inputs_at, first), FLOATS)
            with emit.loop(num_past, [emit.load(emit.at(bias_at, first), FLOATS)]) as tap:
                place = emit.at(past, builder.mul(tap.index, past_step))
                following = builder.add(tap.index, INT64(1))
                is_last = builder.icmp_signed("==", following, num_past)
                before = emit.load(place, FLOATS)
                behind = emit.load(emit.at(past, builder.mul(following, past_step)), FLOATS)
                emit.store(builder.select(is_last, read, behind), place)
                weight = emit.load(emit.at(taps, builder.mul(tap.index, tap_step)), FLOATS)
                tap.next.append(emit.multiply_add(before, weight, tap.carried[0]))
            weight = emit.load(emit.at(taps, builder.mul(num_past, tap_step)), FLOATS)
            emit.store(emit.multiply_add(read, weight, tap.next[0]), emit.at(out_at, first))
        return context.get_dummy_value()

    return types.void(_INTP, taps, *[_INTP] * 4), generate


@emitted
def advance(
    typing: TypingContext, matrix: NumbaType, change: NumbaType, seen: NumbaType, num_vectors: NumbaType
) -> Intrinsic:
    """Change `num_vectors` columns of vectors of a HeadMatrix, and let the next token see them as they are then: its
    own change takes the place of the one in `change`. `num_vectors` is a compile-time constant.
    """
    count = num_vectors.literal_value

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit, none = Emitter(context, builder), constant(FLOATS, 0.0)
        address, num_rows, step = emit.members(args[0], 3)
        decay, key, change = emit.members(args[1], 3)
        columns = [emit.at(emit.pointer(address), builder.mul(step, INT64(i))) for i in range(count)]
        key_at, change_at, decay = emit.pointer(key), emit.pointer(change), emit.splat(decay)
        own_decay, strength, product, next_key, query, values, result = emit.members(args[2], 7)
        rows_at = [key_at, emit.pointer(next_key), emit.pointer(query)]
        changes = [emit.load(emit.at(change_at, i * VECTOR_BYTES), FLOATS) for i in range(count)]
        with emit.loop(num_rows, [none] * (2 * count)) as row:
            offset = builder.mul(row.index, INT64(FLOAT_BYTES))
            by_change, by_key, by_query = (emit.splat(emit.load(emit.at(at, offset), FLOAT)) for at in rows_at)
            offset = builder.mul(row.index, INT64(VECTOR_BYTES))
            for i in range(count):
                place = emit.at(columns[i], offset)
                number = emit.multiply_add(by_change, changes[i], builder.fmul(emit.load(place, FLOATS), decay))
                emit.store(number, place)
                row.next.append(emit.multiply_add(number, by_key, row.carried[2 * i]))
                row.next.append(emit.multiply_add(number, by_query, row.carried[2 * i + 1]))
        own_decay, strength, product = (emit.splat(number) for number in (own_decay, strength, product))
        values_at, result_at = emit.pointer(values), emit.pointer(result)
        for i in range(count):
            wanted = emit.load(emit.at(values_at, i * VECTOR_BYTES), FLOATS)
            missing = builder.fsub(wanted, builder.fmul(own_decay, row.next[2 * i]))
            own = builder.fmul(missing, strength)
            emit.store(own, emit.at(change_at, i * VECTOR_BYTES))
            seen_now = emit.multiply_add(product, own, builder.fmul(own_decay, row.next[2 * i + 1]))
            emit.store(seen_now, emit.at(result_at, i * VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(matrix, change, seen, num_vectors), generate


@emitted
def scan_columns(
    typing: TypingContext, matrix: NumbaType, row_step: NumbaType, token: NumbaType, num_vectors: NumbaType
) -> Intrinsic:
    """Let a token pass over `num_vectors` columns of vectors of a HeadMatrix, whose rows are `row_step` bytes apart.
    `num_vectors` is a compile-time constant.
    """
    count = num_vectors.literal_value

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        address, num_rows, step = emit.members(args[0], 3)
        columns = [emit.at(emit.pointer(address), builder.mul(step, INT64(i))) for i in range(count)]
        decay, token_step, key, query, values, result = emit.members(args[2], 6)
        decay, token_step = emit.splat(decay), emit.splat(token_step)
        key_at, query_at, values_at, result_at = (emit.pointer(at) for at in (key, query, values, result))
        places = [emit.at(result_at, i * VECTOR_BYTES) for i in range(count)]
        values = [emit.load(emit.at(values_at, i * VECTOR_BYTES), FLOATS) for i in range(count)]
        changes = [builder.fmul(value, token_step) for value in values]
        with emit.loop(num_rows, [emit.load(place, FLOATS) for place in places]) as row:
            offset = builder.mul(row.index, INT64(FLOAT_BYTES))
            by_key, by_query = (emit.splat(emit.load(emit.at(at, offset), FLOAT)) for at in (key_at, query_at))
            offset = builder.mul(row.index, args[1])
            for i in range(count):
                number_at = emit.at(columns[i], offset)
                number = emit.multiply_add(by_key, changes[i], builder.fmul(emit.load(number_at, FLOATS), decay))
                emit.store(number, number_at)
                row.next.append(emit.multiply_add(number, by_query, row.carried[i]))
        for place, total in zip(places, row.next, strict=True):
            emit.store(total, place)
        return context.get_dummy_value()

    return types.void(matrix, _INTP, token, num_vectors), generate
