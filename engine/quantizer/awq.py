"""AWQ (Lin et al. 2023): searches factors that protect the channels with large activations, and how far to clip. Here
factors are judged with clipping, which finds better ones than before it.

Errors are those of a matrix's products with the calibration tokens. They follow from the Gram matrix G of the inputs,
so no activations are kept: rows D = W - Q(W) cost the trace of D G Dᵀ.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.quantizer.grids import INT4_MAX, INT4_MIN, int4_scales, round_int4, storable
from engine.quantizer.statistics import InputStatistics

_NUM_RATIOS = 20
_MAX_SEARCHED = 2048
"""Outputs, evenly spaced, by which factors are judged: products with the Gram matrix are most of the work."""
_SHARES = tuple(1 - step / 40 for step in range(20))
"""Shares of the largest number of a group at which it may be clipped."""
_FEW_SHARES = _SHARES[::4]
_TINY = 1e-4


def search_factors(
    weights: Sequence[Tensor],
    statistics: Sequence[InputStatistics],
    tie: Callable[[Tensor], Tensor],
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """The factors [inputs], powers of the mean activations, with which rounding `weights` to int4 costs least.

    Each matrix has the statistics of its own tokens: each expert of those that are routed to it, so that experts count
    as much as they are used.
    """
    every = -(-sum(map(len, weights)) // _MAX_SEARCHED)
    pairs = [(weight[::every], seen.gram) for weight, seen in zip(weights, statistics, strict=True) if seen.num_tokens]
    mean = InputStatistics.mean_of(statistics).clamp(min=_TINY)
    best, min_cost = torch.ones_like(mean), float("inf")
    for step in range(_NUM_RATIOS):
        factors = mean ** (step / _NUM_RATIOS)
        factors = tie((factors / (factors.max() * factors.min()).sqrt()).clamp(min=_TINY))
        cost = sum(_cost(rows, gram, factors, group_size, dtype) for rows, gram in pairs)
        if cost < min_cost:
            best, min_cost = factors, cost
    return best


def _cost(rows: Tensor, gram: Tensor, factors: Tensor, group_size: int, dtype: torch.dtype) -> float:
    """The cost of rounding rows after multiplying them by factors."""
    scaled = rows * factors
    of_groups = factors.view(-1, group_size)
    blocks = group_blocks(gram, group_size) / of_groups[:, None] / of_groups[:, :, None]
    scales = clipped_scales(scaled, blocks, dtype, _FEW_SHARES)
    error = rows - round_int4(scaled, scales).dequantized().div_(factors)
    return float(((error @ gram) * error).sum())


def group_blocks(gram: Tensor, group_size: int) -> Tensor:
    """The Gram matrix of each group's inputs, [groups, group_size, group_size], of that of all, [inputs, inputs]."""
    groups = range(0, len(gram), group_size)
    return torch.stack([gram[i : i + group_size, i : i + group_size] for i in groups])


def clipped_scales(weight: Tensor, grams: Tensor, dtype: torch.dtype, shares: Sequence[float] = _SHARES) -> Tensor:
    """Scales [outputs, groups] that may clip the largest numbers of a group, where that costs less than larger steps.

    grams: see group_blocks. The cost of a group leaves out what it has in common with others.
    """
    group_size = grams.shape[2]
    grouped = weight.reshape(len(weight), -1, group_size).transpose(0, 1).contiguous()  # [groups, outputs, group_size]
    unclipped = int4_scales(weight, group_size, torch.float32).t()[:, :, None]
    best, min_cost = storable(unclipped, dtype), torch.full_like(unclipped, float("inf"))
    for share in shares:
        scales = storable(unclipped * share, dtype)
        error = grouped - (grouped / scales).round_().clamp_(INT4_MIN, INT4_MAX).mul_(scales)
        cost = ((error @ grams).mul_(error)).sum(2, keepdim=True)
        best = torch.where(cost < min_cost, scales, best)
        min_cost = torch.minimum(cost, min_cost)
    return best[:, :, 0].t().contiguous()
