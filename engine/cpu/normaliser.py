"""The largest of long rows, and log(sum(exp(x))): both while a row is near."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cpu.jit import jit
from engine.cpu.vectors import KEYS as LANES
from engine.cpu.vectors import address, index_of_largest, sum_of_exponents


@jit
def _summarise(logits: Any, largest: Any, normalisers: Any) -> None:
    whole = logits.shape[1] // LANES
    for row in range(logits.shape[0]):
        values = logits[row]
        best = index_of_largest(address(values), whole) if whole > 0 else 0
        for i in range(whole * LANES, len(values)):
            if values[i] > values[best]:
                best = i
        highest = values[best]
        total = np.float32(0.0) if whole == 0 else sum_of_exponents(address(values), whole, highest)
        for i in range(whole * LANES, len(values)):
            total += np.exp(values[i] - highest)
        largest[row] = best
        normalisers[row] = np.log(total) + highest


def summarise(logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The column of each row's largest value (the first, of equal ones), and log(sum(exp(row))), of fp32 logits
    [rows, vocab_size] whose columns lie side by side.
    """
    largest, normalisers = np.empty(len(logits), np.int64), np.empty(len(logits), np.float32)
    _summarise(logits, largest, normalisers)
    return largest, normalisers
