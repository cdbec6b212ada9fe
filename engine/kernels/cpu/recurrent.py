"""The tokens of a step in a recurrent layer, between its projections, as engine/models/recurrent computes it in torch.

States are updated where they lie, in rows of the KV cache. A unit of work is a sequence's channels, or its value heads
that share a key head. It takes the sequence's tokens one after the other, and reads and writes numbers of its own, so
results depend neither on chunks, nor on other sequences, nor on the number of threads.

A head's matrix is copied to where 32 of its columns stay in the L1 cache: these take all tokens before the next columns
do, because columns do not depend on each other. So a long prompt costs the multiplications and no more.
"""

from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from engine.kernels.cpu.activations import activate
from engine.kernels.cpu.arguments import (
    SILU,
    Address,
    Floats,
    Part,
    Range,
    Recurrent,
    StatePlaces,
    StateSteps,
)
from engine.kernels.cpu.compiler import (
    Builder,
    CodeContext,
    Intrinsic,
    NumbaType,
    Signature,
    TypingContext,
    Value,
    Values,
    emitted,
    entry,
    jit,
)
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES, VECTOR_BYTES
from engine.kernels.cpu.recurrent_vectors import (
    Change,
    HeadMatrix,
    Seen,
    Taps,
    advance,
    convolve,
    copy_vectors,
    dot_rows,
    gate_row,
)
from engine.kernels.cpu.vectors import address, read_float, scale_row, weigh_row, write_float

_ONE = np.float32(1.0)
_NOTHING = np.float32(0.0)
_MAX_EXPONENT = np.float32(80.0)
_LENGTH_EPS = np.float32(1e-6)
_CONV_CHANNELS = 128
"""Channels of a unit of short convolutions."""
_int64: Any = np.int64
"""Widens in compiled code: the step holds int32."""


class _Tokens(NamedTuple):
    """A sequence's rows of a step."""

    seq: int
    first: int
    end: int
    kept_end: int  # the state after this row stays
    is_first: bool  # the state before the first row is of zeros


class _Rows(NamedTuple):
    """Rows of a step, as addresses and steps in bytes."""

    projected: Address
    step: int
    out: Address
    out_step: int


class _State(NamedTuple):
    """The state of a layer of a sequence."""

    layer: int
    seq: int


@entry
def mix(recurrent: Recurrent, layer: int, steps: StateSteps, rows: Floats, out: Floats, part: Part) -> None:
    """Compute one thread's part of a recurrent layer. rows: [num_tokens, projected], which are overwritten; out:
    [num_tokens, result_width].
    """
    channels = recurrent.taps.shape[2]
    num_units = recurrent.num_key_heads if recurrent.num_key_heads else -(-channels // _CONV_CHANNELS)
    work = num_units * len(rows)
    first, end = work * part.number // part.num_parts, work * (part.number + 1) // part.num_parts
    at = _Rows(address(rows), rows.shape[1] * FLOAT_BYTES, address(out), out.shape[1] * FLOAT_BYTES)
    for seq in range(len(steps.tables)):
        tokens = _tokens(steps, seq)
        for unit in range(num_units):
            place = num_units * tokens.first + unit * (tokens.end - tokens.first)
            if place < first or place >= end:
                continue
            if recurrent.num_key_heads:
                _mix_heads(recurrent, layer, steps, tokens, unit, at)
            else:
                own = Range(unit * _CONV_CHANNELS, min(channels, (unit + 1) * _CONV_CHANNELS))
                _mix_channels(recurrent, layer, steps, tokens, own, at)


@emitted
def call_mix(
    typing: TypingContext,
    mix_at: NumbaType,
    recurrent: NumbaType,
    layer: NumbaType,
    steps: NumbaType,
    rows: NumbaType,
    out: NumbaType,
    part: NumbaType,
) -> Intrinsic:
    """Call `mix` by its address. So its code, which depends on no type of weights, is compiled once, and only for
    models that have recurrent layers.
    """
    kinds = (recurrent, layer, steps, rows, out, part)
    if kinds != _mix_types():
        raise TypeError(f"mix is compiled for {_mix_types()}, not for {kinds}")

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        function_type = context.call_conv.get_function_type(types.none, kinds)
        function = builder.inttoptr(args[0], function_type.as_pointer())
        context.call_conv.call_function(builder, function, types.none, kinds, args[1:])
        return context.get_dummy_value()

    return types.void(types.intp, *kinds), generate


@cache
def mix_address() -> Address:
    """The address of `mix`, which is compiled or loaded from disk."""
    dispatcher: Any = mix
    dispatcher.compile(_mix_types())
    compiled = dispatcher.overloads[_mix_types()]
    found: Address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return found


@cache
def _mix_types() -> tuple[Any, ...]:
    """The types of the arguments of `mix`."""
    floats, empty = np.empty((0, 0), np.float32), np.empty(0, np.int64)
    places = StatePlaces(floats, empty, empty, in_piece=0, of_layer=0)
    taps = np.empty((0, 0, 0), np.float32)
    recurrent = Recurrent(taps, floats, floats, floats, floats, _NOTHING, num_key_heads=0, key_dim=0, places=places)
    counts = np.empty(0, np.int32)
    steps = StateSteps(np.empty((0, 0), np.int64), np.empty(0, np.bool_), counts, counts)
    return tuple(numba.typeof(value) for value in (recurrent, 0, steps, floats, floats, Part(0, 1)))


@jit
def _tokens(steps: StateSteps, seq: int) -> _Tokens:
    first, end = _int64(steps.query_starts[seq]), _int64(steps.query_starts[seq + 1])
    is_first = _int64(steps.context_lens[seq]) == end - first
    return _Tokens(seq, first, end, end - (1 if steps.is_repeated[seq] else 0), is_first)


@jit
def _mix_channels(
    recurrent: Recurrent, layer: int, steps: StateSteps, tokens: _Tokens, own: Range, rows: _Rows
) -> None:
    """Some channels of a short convolution: rows are [input gate, gate, input]."""
    width, num_vectors = recurrent.taps.shape[2] * FLOAT_BYTES, (own.end - own.first) // LANES
    inputs = np.empty(own.end - own.first, np.float32)
    past = _begin(recurrent, layer, steps, tokens, own)
    for token in range(tokens.first, tokens.end):
        if token == tokens.kept_end:
            _keep(recurrent, layer, steps, tokens, own, past)
        row = rows.projected + token * rows.step + own.first * FLOAT_BYTES
        out = rows.out + token * rows.out_step + own.first * FLOAT_BYTES
        weigh_row(row, row + 2 * width, num_vectors, address(inputs))
        _convolve(recurrent, layer, own, past, address(inputs), out)
        weigh_row(out, row + width, num_vectors, out)
    if tokens.kept_end == tokens.end:
        _keep(recurrent, layer, steps, tokens, own, past)


@jit
def _mix_heads(
    recurrent: Recurrent, layer: int, steps: StateSteps, tokens: _Tokens, key_head: int, rows: _Rows
) -> None:
    """The value heads of a gated delta net that share a key head. Rows are [queries, keys, values, gate of the result,
    strengths, decays].
    """
    key_dim, num_vectors = recurrent.key_dim, recurrent.key_dim // LANES
    query_at, key_at = key_head * key_dim, (recurrent.num_key_heads + key_head) * key_dim
    for column in (query_at, key_at):
        _convolve_tokens(recurrent, layer, steps, tokens, Range(column, column + key_dim), rows)
    products, scale = np.empty(tokens.end - tokens.first, np.float32), _ONE / np.sqrt(np.float32(key_dim))
    for token in range(tokens.first, tokens.end):
        row = rows.projected + token * rows.step
        query, key = row + query_at * FLOAT_BYTES, row + key_at * FLOAT_BYTES
        for vector, length in ((query, scale), (key, _ONE)):
            factor = length / np.sqrt(dot_rows(vector, vector, num_vectors) + _LENGTH_EPS)
            scale_row(vector, num_vectors, factor, vector)
        products[token - tokens.first] = dot_rows(query, key, num_vectors)
    copies = recurrent.rates.shape[1] // recurrent.num_key_heads
    matrix = np.empty(key_dim * recurrent.norms.shape[1], np.float32)
    for head in range(key_head * copies, (key_head + 1) * copies):
        _mix_head(recurrent, layer, steps, tokens, head, products, matrix, rows)


@jit
def _mix_head(
    recurrent: Recurrent,
    layer: int,
    steps: StateSteps,
    tokens: _Tokens,
    head: int,
    products: Floats,
    matrix: Floats,
    rows: _Rows,
) -> None:
    """One value head, whose query and key are computed. matrix: scratch."""
    num_heads, width, key_width = recurrent.rates.shape[1], recurrent.norms.shape[1], len(matrix)
    values_at = 2 * recurrent.num_key_heads * recurrent.key_dim + head * width
    _convolve_tokens(recurrent, layer, steps, tokens, Range(values_at, values_at + width), rows)
    numbers_at = recurrent.taps.shape[2] + num_heads * width + head
    for token in range(tokens.first, tokens.end):
        strength = rows.projected + token * rows.step + numbers_at * FLOAT_BYTES
        decay = strength + num_heads * FLOAT_BYTES
        write_float(strength, _ONE / (_ONE + np.exp(min(-read_float(strength), _MAX_EXPONENT))))
        rate = recurrent.rates[layer, head]
        write_float(decay, np.exp(rate * _softplus(read_float(decay) + recurrent.rate_biases[layer, head])))
    state_at = (recurrent.taps.shape[1] - 1) * recurrent.taps.shape[2] + head * key_width
    if tokens.is_first:
        matrix[:] = _NOTHING
    else:
        _copy_matrix(recurrent, _State(layer, tokens.seq), steps, state_at, matrix, False)
    _advance_columns(recurrent, tokens, head, products, matrix, rows)
    if tokens.kept_end > tokens.first or tokens.is_first:
        _copy_matrix(recurrent, _State(layer, tokens.seq), steps, state_at, matrix, True)
    gates_at, norm = recurrent.taps.shape[2] + head * width, address(recurrent.norms) + layer * width * FLOAT_BYTES
    for token in range(tokens.first, tokens.end):
        out = rows.out + token * rows.out_step + head * width * FLOAT_BYTES
        mean = weigh_row(out, norm, width // LANES, out) / np.float32(width)
        gates = rows.projected + token * rows.step + gates_at * FLOAT_BYTES
        gate_row(out, gates, width // LANES, _ONE / np.sqrt(mean + recurrent.eps), 1)


@jit
def _advance_columns(
    recurrent: Recurrent, tokens: _Tokens, head: int, products: Floats, matrix: Floats, rows: _Rows
) -> None:
    """Let all tokens pass over the columns of a head's matrix."""
    num_vectors = recurrent.norms.shape[1] // LANES
    first = 0
    while first < num_vectors:
        if first + 2 <= num_vectors:
            _advance_some(recurrent, tokens, head, products, matrix, rows, first, 2)
            first += 2
        else:
            _advance_some(recurrent, tokens, head, products, matrix, rows, first, 1)
            first += 1


@jit
def _advance_some(
    recurrent: Recurrent,
    tokens: _Tokens,
    head: int,
    products: Floats,
    matrix: Floats,
    rows: _Rows,
    first: int,
    count: int,
) -> None:
    """The columns of `count` vectors from vector number `first` on. A token changes them when the next one sees them,
    so that they are read once a token.
    """
    change = np.zeros(2 * LANES, np.float32)
    step = recurrent.key_dim * VECTOR_BYTES
    columns = HeadMatrix(address(matrix) + first * step, recurrent.key_dim, step)
    before = Change(_ONE, address(matrix), address(change))
    for token in range(tokens.first, tokens.end):
        seen = _seen(recurrent, head, products[token - tokens.first], rows, token, first)
        if count == 2:
            advance(columns, before, seen, 2)
        else:
            advance(columns, before, seen, 1)
        before = Change(seen.decay, seen.key, address(change))
    if tokens.kept_end == tokens.end:
        nobody = np.empty(2 * LANES, np.float32)
        seen = Seen(_NOTHING, _NOTHING, _NOTHING, before.key, before.key, address(nobody), address(nobody))
        if count == 2:
            advance(columns, before, seen, 2)
        else:
            advance(columns, before, seen, 1)


@jit
def _seen(recurrent: Recurrent, head: int, product: np.float32, rows: _Rows, token: int, vector: int) -> Seen:
    """A token as a head's columns see it, from vector number `vector` on."""
    num_heads, key_dim, width = recurrent.rates.shape[1], recurrent.key_dim, recurrent.norms.shape[1]
    row, key_head = rows.projected + token * rows.step, head // (num_heads // recurrent.num_key_heads)
    numbers = row + (recurrent.taps.shape[2] + num_heads * width + head) * FLOAT_BYTES
    column = head * width + vector * LANES
    return Seen(
        read_float(numbers + num_heads * FLOAT_BYTES),
        read_float(numbers),
        product,
        row + (recurrent.num_key_heads + key_head) * key_dim * FLOAT_BYTES,
        row + key_head * key_dim * FLOAT_BYTES,
        row + (2 * recurrent.num_key_heads * key_dim + column) * FLOAT_BYTES,
        rows.out + token * rows.out_step + column * FLOAT_BYTES,
    )


@jit
def _convolve_tokens(
    recurrent: Recurrent, layer: int, steps: StateSteps, tokens: _Tokens, own: Range, rows: _Rows
) -> None:
    """SiLU of the convolution of some channels, in place."""
    past = _begin(recurrent, layer, steps, tokens, own)
    for token in range(tokens.first, tokens.end):
        if token == tokens.kept_end:
            _keep(recurrent, layer, steps, tokens, own, past)
        row = rows.projected + token * rows.step + own.first * FLOAT_BYTES
        _convolve(recurrent, layer, own, past, row, row)
        activate(row, (own.end - own.first) // LANES, SILU)
    if tokens.kept_end == tokens.end:
        _keep(recurrent, layer, steps, tokens, own, past)


@jit
def _convolve(recurrent: Recurrent, layer: int, own: Range, past: Floats, inputs: Address, out: Address) -> None:
    """One token's channels of the convolution."""
    _, num_taps, channels = recurrent.taps.shape
    weights = address(recurrent.taps) + (layer * num_taps * channels + own.first) * FLOAT_BYTES
    biases = address(recurrent.biases) + (layer * channels + own.first) * FLOAT_BYTES
    taps, num_vectors = Taps(weights, channels * FLOAT_BYTES, biases), (own.end - own.first) // LANES
    convolve(inputs, taps, address(past), num_taps - 1, num_vectors, out)


@jit
def _begin(recurrent: Recurrent, layer: int, steps: StateSteps, tokens: _Tokens, own: Range) -> Floats:
    """The inputs of some channels before the first token: [kernel - 1, channels], and room for one more row."""
    num_past, channels, width = recurrent.taps.shape[1] - 1, recurrent.taps.shape[2], own.end - own.first
    past = np.zeros((num_past + 1) * width, np.float32)
    if not tokens.is_first:
        for tap in range(num_past):
            state, at = _State(layer, tokens.seq), address(past) + tap * width * FLOAT_BYTES
            _copy_row(recurrent.places, state, steps, tap * channels + own.first, width, at, False)
    return past


@jit
def _keep(recurrent: Recurrent, layer: int, steps: StateSteps, tokens: _Tokens, own: Range, past: Floats) -> None:
    """Write the last inputs of some channels to the state."""
    num_past, channels, width = recurrent.taps.shape[1] - 1, recurrent.taps.shape[2], own.end - own.first
    for tap in range(num_past):
        state, at = _State(layer, tokens.seq), address(past) + tap * width * FLOAT_BYTES
        _copy_row(recurrent.places, state, steps, tap * channels + own.first, width, at, True)


@jit
def _copy_row(
    places: StatePlaces, state: _State, steps: StateSteps, first: int, count: int, row: Address, writes: bool
) -> None:
    """Copy numbers [first, first + count) of a state to a row, or from there."""
    done, width = 0, places.rows.shape[1]
    while done < count:
        num_vectors = min(width - (first + done) % width, count - done) // LANES
        at, target = _number_at(places, state, steps, first + done), row + done * FLOAT_BYTES
        if writes:
            copy_vectors(target, VECTOR_BYTES, num_vectors, at, VECTOR_BYTES)
        else:
            copy_vectors(at, VECTOR_BYTES, num_vectors, target, VECTOR_BYTES)
        done += num_vectors * LANES


@jit
def _copy_matrix(
    recurrent: Recurrent, state: _State, steps: StateSteps, first: int, matrix: Floats, writes: bool
) -> None:
    """Copy a head's matrix, which begins at number `first` of the state, to columns of vectors, or from there."""
    places, width, done = recurrent.places, recurrent.norms.shape[1], 0
    row_width, step = places.rows.shape[1], recurrent.key_dim * VECTOR_BYTES
    while done < len(matrix):
        row, column = done // width, done % width
        num_vectors = min(row_width - (first + done) % row_width, width - column) // LANES
        at = _number_at(places, state, steps, first + done)
        target = address(matrix) + column // LANES * step + row * VECTOR_BYTES
        if writes:
            copy_vectors(target, step, num_vectors, at, VECTOR_BYTES)
        else:
            copy_vectors(at, VECTOR_BYTES, num_vectors, target, step)
        done += num_vectors * LANES


@jit
def _number_at(places: StatePlaces, state: _State, steps: StateSteps, number: int) -> Address:
    """The address of a number of a state."""
    width = places.rows.shape[1]
    row = state.layer * places.of_layer + number // width
    found = steps.tables[state.seq, places.block[row]] * places.in_piece + places.first[row]
    return address(places.rows) + (found * width + number % width) * FLOAT_BYTES


@jit
def _softplus(x: np.float32) -> np.float32:
    """log(1 + e^x)."""
    return max(x, _NOTHING) + np.log1p(np.exp(-abs(x)))
