"""AWQ (Lin et al. 2023): searches factors that protect the channels with large activations, and how far to clip. Here
factors are judged with clipping, which finds better ones than before it.

Errors are those of a matrix's products with the calibration tokens. They follow from the Gram matrix G of the inputs,
so no activations are kept: rows D = W - Q(W) cost the trace of D G Dᵀ.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.quantize.grids import int4_scales, round_int4, storable
from engine.quantize.statistics import InputStatistics

_NUM_RATIOS = 20
_MAX_SEARCHED = 2048
"""Outputs, evenly spaced, by which factors are judged: products with the Gram matrix are most of the work."""
_SHRINKING = tuple(1 - step / 40 for step in range(20))
_TINY = 1e-4


def search_factors(
    weight: Tensor, statistics: InputStatistics, tie: Callable[[Tensor], Tensor], group_size: int, dtype: torch.dtype
) -> Tensor:
    """The factors [inputs], powers of the mean activations, with which rounding `weight` to int4 costs least."""
    rows = weight[:: -(-len(weight) // _MAX_SEARCHED)]
    mean = statistics.mean.clamp(min=_TINY)
    best, least = torch.ones_like(mean), float("inf")
    for step in range(_NUM_RATIOS):
        factors = mean ** (step / _NUM_RATIOS)
        factors = tie((factors / (factors.max() * factors.min()).sqrt()).clamp(min=_TINY))
        scaled = rows * factors
        gram = statistics.gram / factors / factors[:, None]
        lost = rows - round_int4(scaled, clipped_scales(scaled, gram, group_size, dtype)).dequantized().div_(factors)
        cost = float(((lost @ statistics.gram) * lost).sum())
        if cost < least:
            best, least = factors, cost
    return best


def clipped_scales(weight: Tensor, gram: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Scales [outputs, groups] that may clip the largest numbers of a group, where that costs less than larger steps.

    gram: that of the inputs, [inputs, inputs]. The cost of a group leaves out what it has in common with others.
    """
    groups = range(0, weight.shape[1], group_size)
    grams = torch.stack([gram[i : i + group_size, i : i + group_size] for i in groups])
    whole = int4_scales(weight, group_size, torch.float32)
    best, least = storable(whole, dtype), torch.full_like(whole, float("inf"))
    for share in _SHRINKING:
        scales = storable(whole * share, dtype)
        lost = (weight - round_int4(weight, scales).dequantized()).unflatten(1, (-1, group_size)).transpose(0, 1)
        cost = ((lost @ grams) * lost).sum(2).t()
        best = torch.where(cost < least, scales, best)
        least = torch.minimum(cost, least)
    return best
