"""log(sum(exp(x))) of long rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cpu.jit import jit
from engine.cpu.vectors import KEYS as LANES
from engine.cpu.vectors import address, sum_of_exponents


@jit
def _log_normalisers(logits: Any, highest: Any, out: Any) -> None:
    whole = logits.shape[1] // LANES
    for row in range(logits.shape[0]):
        values = logits[row]
        total = np.float32(0.0) if whole == 0 else sum_of_exponents(address(values), whole, highest[row])
        for i in range(whole * LANES, len(values)):
            total += np.exp(values[i] - highest[row])
        out[row] = np.log(total) + highest[row]


def log_normalisers(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """For each row of fp32 logits [rows, vocab_size], whose columns lie side by side."""
    out = np.empty(len(logits), np.float32)
    _log_normalisers(logits, logits.max(1), out)
    return out
