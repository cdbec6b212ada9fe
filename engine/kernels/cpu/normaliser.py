"""Index of the largest logit and log(sum(exp(logits))) of each row, computed while the row is in the cache."""

import numpy as np

from engine.kernels.cpu.arguments import Floats, Int64s
from engine.kernels.cpu.constants import LANES
from engine.kernels.cpu.jit import jit
from engine.kernels.cpu.vectors import address, index_of_largest, sum_of_exponents


@jit
def _summarise(logits: Floats, largest: Int64s, normalisers: Floats) -> None:
    num_vectors = logits.shape[1] // LANES
    for row in range(logits.shape[0]):
        values = logits[row]
        best = index_of_largest(address(values), num_vectors) if num_vectors > 0 else 0
        for i in range(num_vectors * LANES, len(values)):
            if values[i] > values[best]:
                best = i
        highest = values[best]
        total = np.float32(0.0) if num_vectors == 0 else sum_of_exponents(address(values), num_vectors, highest)
        for i in range(num_vectors * LANES, len(values)):
            total += np.exp(values[i] - highest)
        largest[row] = best
        normalisers[row] = np.log(total) + highest


def summarise(logits: Floats) -> tuple[Int64s, Floats]:
    """Per row of fp32 logits [rows, vocab_size], the column of the largest value and log(sum(exp(row))).

    The first of equal values counts. Columns must be contiguous.
    """
    largest, normalisers = np.empty(len(logits), np.int64), np.empty(len(logits), np.float32)
    _summarise(logits, largest, normalisers)
    return largest, normalisers
