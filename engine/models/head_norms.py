"""Norms of queries and keys in the eager decoder, see ModelConfig.qk_norm_of."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.encodings import Parameters
from engine.models.linear import rms_norm
from engine.models.model_config import ModelConfig
from engine.models.rank_group import SummingGroup


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each head. `weights`: of queries and of keys, [1 or number of heads, head_dim]."""

    weights: tuple[Tensor, Tensor]
    eps: float
    centred: bool

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries [num_tokens, num_heads, head_dim], keys [.., num_kv_heads, ..] -> both beside each other."""
        return torch.cat([self._norm(*each) for each in zip((queries, keys), self.weights, strict=True)], 1)

    def _norm(self, heads: Tensor, weight: Tensor) -> Tensor:
        shape = heads.shape[-1:]
        if self.centred:
            return F.layer_norm(heads, shape, None, None, self.eps) * weight
        if len(weight) == 1:
            return rms_norm(heads, weight[0], self.eps)
        return F.rms_norm(heads, shape, None, self.eps) * weight


@dataclass(frozen=True, slots=True)
class ProjectionNorms:
    """Norms of all queries and of all keys of a token. With `ranks` each rank has some of the heads.

    widths: numbers that the sums of squares add up, of queries and of keys; heads of which ranks hold copies count as
    often as they are held.
    """

    weights: tuple[Tensor, Tensor]  # of the own heads, [num_heads, head_dim] and [num_kv_heads, head_dim]
    eps: float
    widths: tuple[int, int]
    ranks: SummingGroup | None

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """As HeadNorms."""
        squares = torch.stack([heads.float().square().sum((1, 2)) for heads in (queries, keys)])  # [2, num_tokens]
        squares = squares if self.ranks is None else self.ranks.sum(squares)
        normed = [
            heads * (sums / width + self.eps).rsqrt()[:, None, None] * weight
            for heads, sums, width, weight in zip((queries, keys), squares, self.widths, self.weights, strict=True)
        ]
        return torch.cat(normed, 1).to(queries.dtype)


def take_head_norms(
    parameters: Parameters, prefix: str, config: ModelConfig, ranks: SummingGroup | None
) -> HeadNorms | ProjectionNorms | None:
    if not config.qk_norm:
        return None
    queries, keys = (parameters.take(prefix + name).view(-1, config.head_dim) for name in ("q_norm", "k_norm"))
    if config.qk_norm_of != "all":
        return HeadNorms((queries, keys), config.norm_eps, config.norm == "layer")
    num_copies = 1 if ranks is None else max(1, ranks.degrees.tensor // config.num_kv_heads)
    widths = config.num_heads * config.head_dim, config.num_kv_heads * num_copies * config.head_dim
    summing = ranks if ranks is not None and ranks.sums else None
    return ProjectionNorms((queries, keys), config.norm_eps, widths, summing)
