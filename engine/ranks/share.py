"""The share of a model that one tensor-parallel rank holds: some heads, and some columns of every matrix.

Every matrix is cut by outputs, never by inputs. An output is then a sum over all inputs in the same order with any
number of ranks, so the results are equal to the bit, and no sums cross ranks. Ranks exchange activations instead, which
is cheap where they share memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.models.facts import ModelConfig
from engine.models.parameters import ParameterSpec, RowOrder
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees, Span, kv_spans

_UNIT = 32
"""Outputs are cut at multiples of it: a unit of the compiled products, and two cache lines of fp32."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """What rank `rank` of `size` computes: KV heads with their query heads, and spans of outputs."""

    rank: int
    size: int
    heads: Span
    hidden: Span
    inner: Span
    vocab: Span


def rank_share(config: ModelConfig, rank: int = 0, size: int = 1) -> RankShare:
    """The share of a rank. Raises ConfigurationError if the model cannot be divided among `size` ranks."""
    if size > config.num_kv_heads:
        raise ConfigurationError(
            f"tensor_parallel {size} does not fit {config.num_kv_heads} KV heads: use {config.num_kv_heads} or fewer"
        )
    heads = kv_spans(config.num_layers, config.num_kv_heads, Degrees(size))[rank].heads
    hidden, inner, vocab = (
        _part(width, rank, size) for width in (config.hidden_size, config.intermediate_size, config.vocab_size)
    )
    return RankShare(rank, size, heads, hidden, inner, vocab)


def share_specs(specs: Sequence[ParameterSpec], config: ModelConfig, share: RankShare) -> list[ParameterSpec]:
    """The parameters with the rows that the rank holds. Rank 0 embeds; others hold rows of a tied embedding as their
    part of the output matrix.
    """
    if share.size == 1:
        return list(specs)
    return [replace(spec, held_rows=_held_rows(spec.name, config, share)) for spec in specs]


def _held_rows(name: str, config: ModelConfig, share: RankShare) -> RowOrder | None:
    """The rows of a parameter that the rank holds; None for all."""
    match name.rpartition(".")[2].removesuffix("_bias"):
        case "qkv":
            return _rows_of_heads(config, share.heads)
        case "o" | "down":
            return _rows(share.hidden)
        case "gate_up":
            return np.concatenate((_rows(share.inner), config.intermediate_size + _rows(share.inner)))
        case "lm_head":
            return _rows(share.vocab)
        case "embed" if share.rank > 0:
            return _rows(share.vocab if config.tied else Span(0, 0))
    return None


def _rows_of_heads(config: ModelConfig, heads: Span) -> RowOrder:
    """Rows of the merged projection [queries, keys, values] that belong to these KV heads."""
    group, dim = config.group_size, config.head_dim
    first_key = config.num_heads * dim
    first_value = first_key + config.num_kv_heads * dim
    queries = np.arange(heads.first * group * dim, heads.end * group * dim)
    kv = np.arange(heads.first * dim, heads.end * dim)
    return np.concatenate((queries, first_key + kv, first_value + kv))


def _rows(span: Span) -> RowOrder:
    return np.arange(span.first, span.end)


def _part(width: int, rank: int, size: int) -> Span:
    """The rank's part of `width` outputs, cut at multiples of _UNIT. It may be empty."""
    num_units = -(-width // _UNIT)
    first, end = (min(width, num_units * number // size * _UNIT) for number in (rank, rank + 1))
    return Span(first, end - first)
