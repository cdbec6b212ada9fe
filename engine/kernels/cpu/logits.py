"""All that log-probabilities need of each row of logits."""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.arguments import Floats, Int64s, Matrix
from engine.kernels.cpu.compiler import entry
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES
from engine.kernels.cpu.vectors import address, index_of_largest, read_float, sum_of_exponents


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
