"""Recurrent states as they lie in rows of the KV cache: flat numbers, which are copied to scratch and back. And causal
convolutions of channels, whose state is the last inputs, for the tokens of one sequence.
"""

from typing import Any, NamedTuple

import numpy as np

from engine.kernels.cpu.activations import activate
from engine.kernels.cpu.arguments import (
    SILU,
    Address,
    Floats,
    Range,
)
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES, VECTOR_BYTES
from engine.kernels.cpu.recurrent.recurrent_arguments import Recurrent, StatePlaces, StateSteps
from engine.kernels.cpu.recurrent.recurrent_vectors import Taps, convolve, copy_vectors
from engine.kernels.cpu.vectors import address, weigh_row

_int64: Any = np.int64
"""Widens in compiled code: the step holds int32."""


class Tokens(NamedTuple):
    """A sequence's rows of a step."""

    seq: int
    first: int
    end: int
    kept_end: int  # the state before this row stays
    is_first: bool  # the state before the first row is of zeros


class MixedRows(NamedTuple):
    """Rows of a step, as addresses and steps in bytes."""

    projected: Address
    step: int
    out: Address
    out_step: int


@jit
def tokens_of(steps: StateSteps, seq: int) -> Tokens:
    first, end = _int64(steps.query_starts[seq]), _int64(steps.query_starts[seq + 1])
    is_first = _int64(steps.context_lens[seq]) == end - first
    return Tokens(seq, first, end, end - _int64(steps.num_repeated[seq]), is_first)


@jit
def copy_row(
    places: StatePlaces,
    layer: int,
    seq: int,
    steps: StateSteps,
    first: int,
    count: int,
    row: Address,
    writes: bool,
) -> None:
    """Copy numbers [first, first + count) of a sequence's state of a layer to an fp32 row, or, if `writes`, back."""
    done, width = 0, places.rows.shape[1]
    while done < count:
        num_vectors = min(width - (first + done) % width, count - done) // LANES
        at, target = _number_at(places, layer, seq, steps, first + done), row + done * FLOAT_BYTES
        if writes:
            copy_vectors(target, VECTOR_BYTES, num_vectors, at, VECTOR_BYTES)
        else:
            copy_vectors(at, VECTOR_BYTES, num_vectors, target, VECTOR_BYTES)
        done += num_vectors * LANES


@jit
def copy_matrix(
    recurrent: Recurrent, layer: int, seq: int, steps: StateSteps, first: int, matrix: Floats, writes: bool
) -> None:
    """Copy a head's matrix, which begins at number `first` of the state, to columns of vectors, or, if
    `writes`, back.
    """
    places, width, done = recurrent.places, recurrent.value_dim, 0
    row_width, step = places.rows.shape[1], recurrent.key_dim * VECTOR_BYTES
    while done < len(matrix):
        row, column = done // width, done % width
        num_vectors = min(row_width - (first + done) % row_width, width - column) // LANES
        at = _number_at(places, layer, seq, steps, first + done)
        target = address(matrix) + column // LANES * step + row * VECTOR_BYTES
        if writes:
            copy_vectors(target, step, num_vectors, at, VECTOR_BYTES)
        else:
            copy_vectors(at, VECTOR_BYTES, num_vectors, target, step)
        done += num_vectors * LANES


@jit
def _number_at(places: StatePlaces, layer: int, seq: int, steps: StateSteps, number: int) -> Address:
    """The address of a number of a state."""
    width = places.rows.shape[1]
    row = layer * places.of_layer + number // width
    found = steps.tables[seq, places.block[row]] * places.in_piece + places.first[row]
    return address(places.rows) + (found * width + number % width) * FLOAT_BYTES


@jit
def numbers_from(places: StatePlaces, layer: int, seq: int, steps: StateSteps, number: int) -> tuple[Address, int]:
    """The address of a number of a state, and how many numbers follow without a gap, itself included."""
    width = places.rows.shape[1]
    in_piece = places.first[layer * places.of_layer + number // width] % places.in_piece
    return _number_at(places, layer, seq, steps, number), (places.in_piece - in_piece) * width - number % width


@jit
def mix_channels(
    recurrent: Recurrent, layer: int, steps: StateSteps, tokens: Tokens, own: Range, rows: MixedRows
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
def convolve_tokens(
    recurrent: Recurrent, layer: int, steps: StateSteps, tokens: Tokens, own: Range, rows: MixedRows
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
def _begin(recurrent: Recurrent, layer: int, steps: StateSteps, tokens: Tokens, own: Range) -> Floats:
    """The inputs of some channels before the first token: [kernel - 1, channels], and room for one more row."""
    num_past, channels, width = recurrent.taps.shape[1] - 1, recurrent.taps.shape[2], own.end - own.first
    past = np.zeros((num_past + 1) * width, np.float32)
    if not tokens.is_first:
        for tap in range(num_past):
            at = address(past) + tap * width * FLOAT_BYTES
            copy_row(recurrent.places, layer, tokens.seq, steps, tap * channels + own.first, width, at, False)
    return past


@jit
def _keep(recurrent: Recurrent, layer: int, steps: StateSteps, tokens: Tokens, own: Range, past: Floats) -> None:
    """Write the last inputs of some channels to the state."""
    num_past, channels, width = recurrent.taps.shape[1] - 1, recurrent.taps.shape[2], own.end - own.first
    for tap in range(num_past):
        at = address(past) + tap * width * FLOAT_BYTES
        copy_row(recurrent.places, layer, tokens.seq, steps, tap * channels + own.first, width, at, True)


@jit
def softplus(x: np.float32) -> np.float32:
    """log(1 + e^x)."""
    return max(x, np.float32(0.0)) + np.log1p(np.exp(-abs(x)))
