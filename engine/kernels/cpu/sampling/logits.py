"""All that log-probabilities need of each row of logits, and its largest ones."""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.arguments import Address, Floats, Int64s, Matrix, Range
from engine.kernels.cpu.compilation.compiler import entry, jit
from engine.kernels.cpu.compilation.stored import Addresses, Kernel, Kinds, load
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES
from engine.kernels.cpu.threads.barrier import share_of
from engine.kernels.cpu.vectors import address, index_of_largest, read_float, sum_of_exponents

_BLOCK = 256
"""Columns of which none is looked at if the largest is too small."""


class Summaries(NamedTuple):
    """Of rows of logits: the column of the largest value, the first of equal ones; log(sum(exp(row))); that value."""

    largest: Int64s  # [rows]
    normalisers: Floats  # [rows]
    highest: Floats  # [rows]


@entry
def _summarise(logits: Matrix, num_columns: int, tails: Floats, summaries: Summaries) -> None:
    num_vectors = num_columns // LANES
    for row in range(len(tails)):
        values, tail = logits.address + row * logits.step, address(tails[row])
        best, highest, total = 0, np.float32(-np.inf), np.float32(0.0)
        if num_vectors > 0:
            best = index_of_largest(values, num_vectors)
            highest = read_float(values + best * FLOAT_BYTES)
        if tails.shape[1] > 0:
            in_tail = index_of_largest(tail, 1)
            if num_vectors == 0 or tails[row, in_tail] > highest:
                best, highest = num_vectors * LANES + in_tail, tails[row, in_tail]
            total = sum_of_exponents(tail, 1, highest)
        if num_vectors > 0:
            total += sum_of_exponents(values, num_vectors, highest)
        summaries.largest[row] = min(best, num_columns - 1)
        summaries.normalisers[row] = np.log(total) + highest
        summaries.highest[row] = highest


def summarise(logits: Floats) -> Summaries:
    """Summarise fp32 logits [rows, vocab_size]. Columns must be contiguous. All numbers go through the same vector
    loops, so a row's result does not depend on the layout of the others.
    """
    num_rest = logits.shape[1] % LANES
    tails = np.empty((len(logits), LANES if num_rest else 0), np.float32)
    if num_rest:
        tails[:, :num_rest], tails[:, num_rest:] = logits[:, logits.shape[1] - num_rest :], -np.inf
    summaries = Summaries(np.empty(len(logits), np.int64), *np.empty((2, len(logits)), np.float32))
    # An address: arrays with and without gaps between rows are of two types, each of which would be compiled.
    rows = Matrix(logits.ctypes.data, logits.strides[0])
    _summarise(rows, logits.shape[1], tails, summaries)
    return summaries


class Tops(NamedTuple):
    """Rows of fp32 logits, and their largest values in falling order, of equal ones the first."""

    logits: Matrix
    num_columns: int
    rows: Int64s  # [tops]: of the logits
    values: Floats  # [tops, number of values], written
    columns: Int64s  # [tops, number of values], written


@Kernel
def find_tops(kinds: Kinds, addresses: Addresses, _: Range) -> None:
    """Find the largest values of each row. Every thread runs this kernel, on Tops, anything twice, and Team."""
    tops, _, _, team = load(kinds, addresses)
    own = share_of(len(tops.rows), team.thread, team.num_threads)
    for i in range(own.first, own.end):
        row = tops.logits.address + tops.rows[i] * tops.logits.step
        _find_top(row, tops.num_columns, tops.values[i], tops.columns[i])


@jit
def _find_top(row: Address, num_columns: int, values: Floats, columns: Int64s) -> None:
    count = len(values)
    for column in range(count):
        _insert(read_float(row + column * FLOAT_BYTES), column, column, values, columns)
    for first in range(count, num_columns, _BLOCK):
        end = min(first + _BLOCK, num_columns)
        num_vectors = (end - first) // LANES
        unseen = first
        if num_vectors > 0:
            largest = first + index_of_largest(row + first * FLOAT_BYTES, num_vectors)
            if read_float(row + largest * FLOAT_BYTES) <= values[count - 1]:
                unseen = first + num_vectors * LANES
        for column in range(unseen, end):
            value = read_float(row + column * FLOAT_BYTES)
            if value > values[count - 1]:
                _insert(value, column, count - 1, values, columns)


@jit
def _insert(value: np.float32, column: int, num_kept: int, values: Floats, columns: Int64s) -> None:
    """Insert a value into the first `num_kept`, which are in falling order; the one behind them is lost."""
    place = num_kept
    while place > 0 and value > values[place - 1]:
        values[place], columns[place] = values[place - 1], columns[place - 1]
        place -= 1
    values[place], columns[place] = value, column
