"""LatentConfig: the part of a ModelConfig that describes multi-head latent attention."""

from dataclasses import dataclass

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever config.json says of the others."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1). Keys and values of all heads are projections of one
    latent vector per token, `kv_rank` wide. The cache has one KV head, [rotated dimensions, latent]: queries are
    projected to the latent, and so is the result of attention from it (`engine/models/latent.py`).

    A query head has `rope.dim` rotated dimensions and `plain_dim` others. `query_rank`: width of the queries' own
    latent, 0 if they are projected at once. `value_dim`: of a head's result.
    """

    kv_rank: int
    plain_dim: int
    value_dim: int
    query_rank: int = 0


NO_LATENT = LatentConfig(0, 0, 0)
