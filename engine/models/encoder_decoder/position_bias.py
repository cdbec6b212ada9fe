"""Relative position bias: a learned value per head and bucket of distances, added to the score of a key.

In each direction, half of the buckets hold one distance each. The other half covers longer distances on a logarithmic
scale; the last bucket holds all distances from `max_distance` on. (Raffel et al. 2020, §2.1)
"""

import math

import torch
from torch import Tensor


class PositionBias:
    """Position biases of the encoder or the decoder, shared by its layers. `weight`: [num_buckets, num_heads]."""

    def __init__(self, weight: Tensor, max_distance: int, *, both_directions: bool) -> None:
        distances = torch.arange(-max_distance, max_distance + 1)
        buckets = _bucket(distances, weight.shape[0], max_distance, both_directions=both_directions)
        self._max_distance = max_distance
        self._by_distance = weight[buckets.to(weight.device)].T.contiguous()  # [num_heads, 2 * max_distance + 1]

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions [.., num_queries] and [.., num_keys] -> biases [num_heads, .., num_queries, num_keys]."""
        distances = keys[..., None, :] - queries[..., :, None]
        limit = self._max_distance
        return self._by_distance[:, distances.clamp_(-limit, limit).add_(limit)]


def _bucket(distances: Tensor, num_buckets: int, max_distance: int, *, both_directions: bool) -> Tensor:
    """Buckets of distances (key minus query). With one direction only, keys after the query get the bucket of 0."""
    buckets = torch.zeros_like(distances)
    if both_directions:
        num_buckets //= 2
        buckets += (distances > 0) * num_buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    num_exact = num_buckets // 2
    # In fp32, and in this order, to round exactly as transformers does.
    ratio = torch.log(distances.float() / num_exact) / math.log(max_distance / num_exact)
    far = (num_exact + (ratio * (num_buckets - num_exact)).to(torch.long)).clamp(max=num_buckets - 1)
    return buckets + torch.where(distances < num_exact, distances, far)
