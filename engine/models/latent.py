"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1.2) of the eager decoder, with the projections of keys and
values absorbed: attention runs over the latents in the cache, which all heads share.

A head's score q . (W_k c) is (W_k^T q) . c, so the query is projected instead of every key in the context. Its result
sum of p W_v c is W_v (sum of p c), so the sum is projected instead of every value. The one KV head has the keys
[rotated dimensions, latent], and the same rows as values.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention.backend import AttentionShape
from engine.models.encodings import LinearParameters, Parameters
from engine.models.latent_config import LATENT_EPS, LatentConfig
from engine.models.model_config import ModelConfig
from engine.models.norms import Norm
from engine.models.rope import Rotation, rotate

if TYPE_CHECKING:
    from engine.models.linear import LinearLayer


class LatentHeads:
    """The products of latent attention between a layer's first projection and the attention backend, and after that."""

    def __init__(
        self,
        parameters: Parameters,
        prefix: str,
        config: ModelConfig,
        kv_norm: Callable[[Tensor], Tensor],
        from_query_latent: Callable[[Tensor], Tensor] | None,
    ) -> None:
        assert config.latent is not None
        self._latent: LatentConfig = config.latent
        self._rotated = config.rope.dim
        self._kv_norm = kv_norm
        self._from_query_latent = from_query_latent
        rank = config.latent.kv_rank
        # [heads, plain_dim, kv_rank] and [heads, kv_rank, value_dim]
        self._to_latent = parameters.take(f"{prefix}key_up").view(-1, config.latent.plain_dim, rank)
        self._from_latent = parameters.take(f"{prefix}value_up").view(-1, config.latent.value_dim, rank).transpose(1, 2)

    def project(self, projected: Tensor, shape: AttentionShape, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [num_tokens, num_heads, head_dim], keys and values [num_tokens, 1, head_dim], which are the same.
        `projected`: [num_tokens, queries or their latent, latent of KV, rotated key].
        """
        rotated, rank = self._rotated, self._latent.kv_rank
        q_width = projected.shape[1] - rank - rotated
        queries, latent, key = torch.split(projected, [q_width, rank, rotated], 1)
        if self._from_query_latent is not None:
            queries = self._from_query_latent(queries)
        heads = queries.view(len(queries), shape.num_heads, rotated + self._latent.plain_dim)
        turned = rotate(torch.cat((heads[..., :rotated], key[:, None]), 1), rotation.cos, rotation.sin)
        absorbed = torch.bmm(heads[..., rotated:].transpose(0, 1), self._to_latent).transpose(0, 1)
        keys = torch.cat((turned[:, -1:], self._kv_norm(latent)[:, None]), -1)
        queries = torch.cat((turned[:, :-1], absorbed), -1)
        if rotation.query_factors is not None:
            queries = queries * rotation.query_factors
        return queries, keys, keys

    def results(self, mixed: Tensor, shape: AttentionShape) -> Tensor:
        """[num_tokens, num_heads * head_dim] of the backend -> [num_tokens, num_heads * value_dim]."""
        heads = mixed.view(len(mixed), shape.num_heads, shape.head_dim)[..., self._rotated :]
        return torch.bmm(heads.transpose(0, 1), self._from_latent).transpose(0, 1).flatten(1)


def take_latent(
    parameters: Parameters,
    prefix: str,
    config: ModelConfig,
    make_linear: Callable[[str, LinearParameters], "LinearLayer"],
) -> LatentHeads:
    """Take what a layer of a model with latent attention has beside `qkv` and `o`."""
    from_query_latent: Callable[[Tensor], Tensor] | None = None
    if config.latent is not None and config.latent.query_rank:
        norm = Norm(parameters.take(f"{prefix}q_norm"), None, LATENT_EPS)
        linear = make_linear(f"{prefix}q_b", parameters.take_linear(f"{prefix}q_b"))
        from_query_latent = partial(_norm_and_multiply, norm, linear)
    kv_norm = Norm(parameters.take(f"{prefix}kv_norm"), None, LATENT_EPS)
    return LatentHeads(parameters, prefix, config, kv_norm, from_query_latent)


def _norm_and_multiply(norm: Norm, linear: "LinearLayer", x: Tensor) -> Tensor:
    return linear(linear.ops.norm(x, norm))
