"""Norms of the eager decoder: of the residual, and of queries and keys (see ModelConfig.qk_norm_of)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.encodings import Parameters
from engine.models.model_config import ModelConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in fp32."""
    if not is_cpu_fp32(x):
        return F.rms_norm(x, weight.shape, weight, eps)
    # torch has no fused kernel for CPU; this takes half as many operations as its decomposition.
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight)


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm over the last dimension or, if `centred`, layer norm. `over_ranks`: ranks have parts of a
    row of this width, and the sums of squares are added up over them.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool = False
    over_ranks: tuple[Callable[[Tensor], Tensor], int] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.over_ranks is not None:
            sum_over_ranks, width = self.over_ranks
            squares = sum_over_ranks(x.float().square().sum(-1, keepdim=True))
            return (x * (squares / width + self.eps).rsqrt() * self.weight).to(x.dtype)
        if self.centred:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps)


def is_cpu_fp32(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each head. `weights`: of queries and of keys, [1 or number of heads, head_dim]."""

    weights: tuple[Tensor, Tensor]
    eps: float
    centred: bool

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries [num_tokens, num_heads, head_dim], keys [.., num_kv_heads, ..] -> both side by side."""
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
    """Norms of all queries and of all keys of a token. Each of several ranks has some of the heads.

    widths: how many numbers are in the sums of squares, of queries and of keys; a head that several ranks hold counts
    once for each.
    """

    weights: tuple[Tensor, Tensor]  # of the own heads, [num_heads, head_dim] and [num_kv_heads, head_dim]
    eps: float
    widths: tuple[int, int]
    sum_over_ranks: Callable[[Tensor], Tensor] | None

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """As HeadNorms."""
        squares = torch.stack([heads.float().square().sum((1, 2)) for heads in (queries, keys)])  # [2, num_tokens]
        squares = squares if self.sum_over_ranks is None else self.sum_over_ranks(squares)
        normed = [
            heads * (sums / width + self.eps).rsqrt()[:, None, None] * weight
            for heads, sums, width, weight in zip((queries, keys), squares, self.widths, self.weights, strict=True)
        ]
        return torch.cat(normed, 1).to(queries.dtype)


def take_sub_norm(
    parameters: Parameters, name: str, config: ModelConfig, sum_over_ranks: Callable[[Tensor], Tensor] | None
) -> Norm | None:
    """Take a norm of ModelConfig.sub_norms, if the model has them. With `sum_over_ranks` each rank has a part of it."""
    if not config.sub_norms:
        return None
    width = config.num_heads * config.head_dim if name.endswith("o_norm") else config.intermediate_size
    over_ranks = None if sum_over_ranks is None else (sum_over_ranks, width)
    return Norm(parameters.take(name), None, config.norm_eps, over_ranks=over_ranks)


def take_head_norms(
    parameters: Parameters,
    prefix: str,
    config: ModelConfig,
    num_tensor_ranks: int,
    sum_over_ranks: Callable[[Tensor], Tensor] | None,
) -> HeadNorms | ProjectionNorms | None:
    """Take the norms of a layer whose heads are divided among `num_tensor_ranks` ranks."""
    if not config.qk_norm:
        return None
    queries, keys = (parameters.take(prefix + name).view(-1, config.head_dim) for name in ("q_norm", "k_norm"))
    if config.qk_norm_of != "all":
        return HeadNorms((queries, keys), config.norm_eps, config.norm == "layer")
    num_copies = max(1, num_tensor_ranks // config.num_kv_heads)
    widths = config.num_heads * config.head_dim, config.num_kv_heads * num_copies * config.head_dim
    return ProjectionNorms((queries, keys), config.norm_eps, widths, sum_over_ranks)
