"""Do draws fit a distribution? Pearson's chi-square, for samplers of every kind.

    assert fit(counts, probabilities) > UNLIKELY

Draws in tests come from fixed seeds, so a test that passes always passes; that it would fail for a wrong distribution
is shown in tests/component/sampling/test_sampling_statistics.py.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

UNLIKELY = 1e-4
"""A right sampler comes out below this once in ten thousand choices of seeds."""

_MIN_EXPECTED = 5.0


def fit(counts: ArrayLike, probabilities: ArrayLike) -> float:
    """Probability that draws of `probabilities` [n] differ at least as much from it as `counts` [n] do.

    Outcomes that are expected less than five times are taken together. One draw of an impossible outcome gives 0.
    """
    seen, expected = np.asarray(counts, np.float64), np.asarray(probabilities, np.float64)
    expected = expected / expected.sum() * seen.sum()
    if (seen[expected == 0] > 0).any():
        return 0.0
    rare = expected < _MIN_EXPECTED
    return _tail(_pooled(seen, rare), _pooled(expected, rare), num_constraints=1)


def independence(first: Sequence[int], second: Sequence[int]) -> float:
    """Probability that pairs of independent draws depend on each other at least as much as these do."""
    rows, columns = np.unique(first, return_inverse=True)[1], np.unique(second, return_inverse=True)[1]
    table = np.zeros((rows.max() + 1, columns.max() + 1))
    np.add.at(table, (rows, columns), 1)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    rare = (expected < _MIN_EXPECTED).ravel()
    seen, wanted = _pooled(table.ravel(), rare), _pooled(expected.ravel(), rare)
    return _tail(seen, wanted, num_constraints=sum(table.shape) - 1)


def _pooled(values: NDArray[np.float64], rare: NDArray[np.bool_]) -> NDArray[np.float64]:
    return np.append(values[~rare], values[rare].sum()) if rare.any() else values


def _tail(seen: NDArray[np.float64], expected: NDArray[np.float64], *, num_constraints: int) -> float:
    """Upper tail of the chi-square distribution: the regularised incomplete gamma function."""
    used = expected > 0
    statistic = float(((seen - expected)[used] ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - num_constraints
    if freedom < 1:
        raise ValueError("too few draws, or outcomes, to say anything")
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))
