"""AWQ (Lin et al. 2023): searches factors that protect the channels with large activations, and how far to clip. Here
factors are judged with clipping, which finds better ones than before it.

Errors are those of a matrix's products with the calibration tokens. They follow from the Gram matrix G of the inputs,
so no activations are kept: rows D = W - Q(W) cost the trace of D G Dᵀ.

A matrix is worked on in tiles, some outputs of one group, which stay in the cache while many ways to clip are tried.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from engine.quantizer.grids import INT4_MAX, INT4_MIN, int4_scales, storable
from engine.quantizer.statistics import InputStatistics, blocks_of_channels

_NUM_RATIOS = 20
_NUM_FINALISTS = 5
_FINALIST_STRIDE = 8
_MIN_JUDGES = 128
"""Ratios are first judged by every eighth of the outputs, or by more if that is few, then the best few by all: most are
far from the best.
"""
_MAX_SEARCHED = 2048
"""Outputs, evenly spaced, by which factors are judged: products with the Gram matrix are most of the work."""
_SHARES = tuple(1 - step / 40 for step in range(20))
"""Shares of the largest number of a group at which it may be clipped."""
_FEW_SHARES = _SHARES[::4]
_TINY = 1e-4
_TILE_NUMBERS = 2**16
"""Numbers of a tile: a quarter of a megabyte in fp32."""


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
    powers = (mean ** (step / _NUM_RATIOS) for step in range(_NUM_RATIOS))
    candidates = [tie((factors / (factors.max() * factors.min()).sqrt()).clamp(min=_TINY)) for factors in powers]

    def cost(number: int, stride: int) -> float:
        factors = candidates[number]
        return sum(_cost(rows[::stride].contiguous(), gram, factors, group_size, dtype) for rows, gram in pairs)

    stride = max(1, min(_FINALIST_STRIDE, sum(len(rows) for rows, _ in pairs) // _MIN_JUDGES))
    by_few = sorted(range(_NUM_RATIOS), key=lambda number: cost(number, stride))
    return candidates[min(sorted(by_few[:_NUM_FINALISTS]), key=lambda number: cost(number, 1))]


def _cost(rows: Tensor, gram: Tensor, factors: Tensor, group_size: int, dtype: torch.dtype) -> float:
    """The cost of rounding rows after multiplying them by factors."""
    error = torch.empty_like(rows)
    for outputs, inputs in _tiles(rows, group_size):
        tile, own = rows[outputs, inputs], factors[inputs]
        scaled, tile_gram = tile * own, gram[inputs, inputs] / own / own[:, None]
        scales = _clipped(scaled, tile_gram, dtype, _FEW_SHARES)
        error[outputs, inputs] = tile - _nearest(scaled, scales, out=scaled).div_(own)
    return cost_of(error, gram)


def cost_of(error: Tensor, gram: Tensor) -> float:
    """The trace of E G Eᵀ. G is symmetric, so products with the half above its diagonal are enough."""
    cost = 0.0
    for block in blocks_of_channels(len(gram)):
        later = slice(block.start, None)
        products = (error[:, block] @ gram[block, later]).mul_(error[:, later])
        cost += 2 * float(products.sum()) - float(products[:, : block.stop - block.start].sum())
    return cost


def clipped_scales(weight: Tensor, gram: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Scales [outputs, groups] that may clip the largest numbers of a group, where that costs less than larger steps.

    gram: [inputs, inputs], of the inputs. The cost of a group leaves out what it has in common with others.
    """
    scales = torch.empty(len(weight), weight.shape[1] // group_size)
    for outputs, inputs in _tiles(weight, group_size):
        tile, tile_gram = weight[outputs, inputs].contiguous(), gram[inputs, inputs].contiguous()
        scales[outputs, inputs.start // group_size] = _clipped(tile, tile_gram, dtype, _SHARES)[:, 0]
    return scales


def _tiles(weight: Tensor, group_size: int) -> Iterator[tuple[slice, slice]]:
    """Outputs and inputs of each tile of a matrix."""
    at_once = max(1, _TILE_NUMBERS // group_size)
    for first_input in range(0, weight.shape[1], group_size):
        for first in range(0, len(weight), at_once):
            yield slice(first, first + at_once), slice(first_input, first_input + group_size)


def _clipped(tile: Tensor, gram: Tensor, dtype: torch.dtype, shares: Sequence[float]) -> Tensor:
    """The scales [outputs, 1] of a tile [outputs, group_size] that cost least; gram: [group_size, group_size]."""
    unclipped = int4_scales(tile, tile.shape[1], torch.float32)
    best, min_cost = storable(unclipped, dtype), torch.full_like(unclipped, float("inf"))
    error, product = torch.empty_like(tile), torch.empty_like(tile)
    for share in shares:
        scales = storable(unclipped * share, dtype)
        torch.sub(tile, _nearest(tile, scales, out=error), out=error)
        cost = torch.mm(error, gram, out=product).mul_(error).sum(1, keepdim=True)
        best = torch.where(cost < min_cost, scales, best)
        min_cost = torch.minimum(cost, min_cost)
    return best


def _nearest(tile: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """The nearest multiples of the scales [outputs, 1] that int4 has."""
    return torch.div(tile, scales, out=out).round_().clamp_(INT4_MIN, INT4_MAX).mul_(scales)
