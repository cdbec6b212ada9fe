"""One pass over each row of logits computes all that its log-probabilities need."""

import numpy as np

from engine.kernels.cpu.arguments import Floats, Int64s, Matrix
from engine.kernels.cpu.compiler import entry
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES
from engine.kernels.cpu.vectors import address, index_of_largest, read_float, sum_of_exponents


@entry
def _summarise(logits: Matrix, num_columns: int, tails: Floats, largest: Int64s, normalisers: Floats) -> None:
    num_vectors = num_columns // LANES
    for row in range(len(largest)):
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
        largest[row] = min(best, num_columns - 1)  # in a row of NaN, any column
        normalisers[row] = np.log(total) + highest


def summarise(logits: Floats) -> tuple[Int64s, Floats]:
    """Per row of fp32 logits [rows, vocab_size], the column of the largest value and log(sum(exp(row))).

    The first of equal values counts. Columns must be contiguous. All numbers go through the same vector loops, so a
    row's result does not depend on the layout of the others.
    """
    num_rest = logits.shape[1] % LANES
    tails = np.empty((len(logits), LANES if num_rest else 0), np.float32)
    if num_rest:
        tails[:, :num_rest], tails[:, num_rest:] = logits[:, logits.shape[1] - num_rest :], -np.inf
    largest, normalisers = np.empty(len(logits), np.int64), np.empty(len(logits), np.float32)
    # An address: arrays with and without gaps between rows are of two types, each of which would be compiled.
    rows = Matrix(logits.ctypes.data, logits.strides[0])
    _summarise(rows, logits.shape[1], tails, largest, normalisers)
    return largest, normalisers
