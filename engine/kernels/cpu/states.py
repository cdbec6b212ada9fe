"""Recurrent states as they lie in rows of the KV cache: flat numbers, which are copied to scratch and back."""

from typing import Any, NamedTuple

import numpy as np

from engine.kernels.cpu.arguments import Address, Floats, Recurrent, StatePlaces, StateSteps
from engine.kernels.cpu.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES, VECTOR_BYTES
from engine.kernels.cpu.recurrent_vectors import copy_vectors
from engine.kernels.cpu.vectors import address

_int64: Any = np.int64
"""Widens in compiled code: the step holds int32."""


class Tokens(NamedTuple):
    """A sequence's rows of a step."""

    seq: int
    first: int
    end: int
    kept_end: int  # the state after this row stays
    is_first: bool  # the state before the first row is of zeros


class MixedRows(NamedTuple):
    """Rows of a step, as addresses and steps in bytes."""

    projected: Address
    step: int
    out: Address
    out_step: int


class State(NamedTuple):
    """The state of a layer of a sequence."""

    layer: int
    seq: int


@jit
def tokens_of(steps: StateSteps, seq: int) -> Tokens:
    first, end = _int64(steps.query_starts[seq]), _int64(steps.query_starts[seq + 1])
    is_first = _int64(steps.context_lens[seq]) == end - first
    return Tokens(seq, first, end, end - (1 if steps.is_repeated[seq] else 0), is_first)


@jit
def copy_row(
    places: StatePlaces, state: State, steps: StateSteps, first: int, count: int, row: Address, writes: bool
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
def copy_matrix(
    recurrent: Recurrent, state: State, steps: StateSteps, first: int, matrix: Floats, writes: bool
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
def _number_at(places: StatePlaces, state: State, steps: StateSteps, number: int) -> Address:
    """The address of a number of a state."""
    width = places.rows.shape[1]
    row = state.layer * places.of_layer + number // width
    found = steps.tables[state.seq, places.block[row]] * places.in_piece + places.first[row]
    return address(places.rows) + (found * width + number % width) * FLOAT_BYTES
