"""The share of a model that one rank holds: some layers, and of these some heads and some of every matrix.

A pipeline stage has consecutive layers. Stage 0 also embeds, and has the final norm and the output matrix.

The ranks of a stage divide its layers by one of two cuts. The compiled decoder has the cut "outputs": every matrix is
cut by outputs, never by inputs. An output is then a sum over all inputs in the same order with any number of ranks, so
the results are equal to the bit, and no sums cross ranks. Ranks exchange activations instead, which is cheap where they
share memory.

The eager decoder has the cut "inputs" (Megatron-LM, Shoeybi et al. 2019): the matrices at the end of attention and MLP
are cut by inputs, the others by outputs, so each rank continues with what it has computed, and two sums per layer cross
ranks; where all queries of a token are normed together, and its keys, a small third one. Experts are not cut but shared
out. Every rank of stage 0 embeds; rank 0 alone computes logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from engine.models.kv_groups import stage_layers
from engine.models.latent_config import LatentConfig
from engine.models.model_config import ModelConfig
from engine.models.parameters import ParameterSpec, RowOrder
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees, Span, kv_spans

Cut = Literal["outputs", "inputs"]

_UNIT = 32
"""Outputs are cut at multiples of it: a unit of the compiled products, and two cache lines of fp32."""
ALONE = Degrees()


@dataclass(frozen=True, slots=True)
class RankShare:
    """The work of a rank: layers, KV heads, query heads that read them, spans of outputs, and experts. Ranks that hold
    copies of a KV head divide its query heads. `shared_inner` is the rank's part of the shared expert's inner width.
    """

    rank: int
    degrees: Degrees
    layers: Span
    heads: Span
    query_heads: Span
    hidden: Span
    inner: Span
    vocab: Span
    experts: Span
    shared_inner: Span

    @property
    def stage(self) -> int:
        return self.rank // self.degrees.tensor

    @property
    def tensor_rank(self) -> int:
        """The rank's number within its stage."""
        return self.rank % self.degrees.tensor


def rank_share(config: ModelConfig, rank: int = 0, degrees: Degrees = ALONE) -> RankShare:
    """The share of a rank. Raises ConfigurationError if the model cannot be divided by these degrees."""
    size = degrees.tensor
    if config.recurrent is not None and degrees.num_ranks > 1:
        raise ConfigurationError(
            f"{degrees} ranks do not fit {config.architecture}: ranks cannot divide recurrent layers yet; use 1"
        )
    if config.per_layer is not None and degrees.num_ranks > 1:
        raise ConfigurationError(
            f"{degrees} ranks do not fit {config.architecture}: ranks cannot divide layers with heads of several sizes "
            "yet; use 1"
        )
    heads = kv_spans(config.num_layers, config.num_kv_heads, degrees)[rank].heads
    num_experts, shared_size = (
        (0, 0) if config.experts is None else (config.experts.num_experts, config.experts.shared_size)
    )
    if config.experts is not None and size > num_experts:
        raise ConfigurationError(
            f"tensor_parallel {size} does not fit {num_experts} experts: use {num_experts} or fewer"
        )
    stage, number = divmod(rank, size)
    first_expert, end_expert = (num_experts * position // size for position in (number, number + 1))
    return RankShare(
        rank,
        degrees,
        layers=stage_layers(config, degrees.pipeline)[stage],
        heads=heads,
        query_heads=_query_heads(config, heads, number, size),
        hidden=_part(config.hidden_size, number, size),
        inner=_part(config.intermediate_size, number, size),
        vocab=_part(config.vocab_size, number, size) if stage == 0 else Span(0, 0),
        experts=Span(first_expert, end_expert - first_expert),
        shared_inner=_part(shared_size, number, size),
    )


def require_own_heads(config: ModelConfig, degrees: Degrees) -> None:
    """Raise ConfigurationError for ranks that would hold copies of KV heads. Those in shared memory have none."""
    if degrees.tensor > config.num_kv_heads:
        raise ConfigurationError(
            f"tensor_parallel {degrees.tensor} does not fit {config.num_kv_heads} KV heads: use {config.num_kv_heads} "
            "or fewer, or rank_memory own, whose ranks may hold copies of a head"
        )


def share_specs(specs: Sequence[ParameterSpec], config: ModelConfig, share: RankShare, cut: Cut) -> list[ParameterSpec]:
    """The parameters with the part that the rank holds."""
    if share.degrees.num_ranks == 1:
        return list(specs)
    specs = [spec if _is_of_stage(spec.name, share, cut) else replace(spec, is_held=False) for spec in specs]
    if cut == "outputs":
        return [replace(spec, held_rows=_held_rows(spec.name, config, share)) for spec in specs]
    specs = [_cut_by_inputs(spec, config, share) if spec.is_held else spec for spec in specs]
    if share.stage == 0 and share.rank > 0:
        # Without it the output matrix would be the embedding.
        specs.append(ParameterSpec("lm_head", (0, config.embed_width), (), is_matrix=True))
    return specs


def adapter_specs(
    specs: Sequence[ParameterSpec], config: ModelConfig, share: RankShare, cut: Cut
) -> list[ParameterSpec]:
    """The parameters with the part whose adapters the rank holds. In the cut "outputs" each thread adds to whole rows,
    except queries, keys and values, which only the rank of their heads has.
    """
    specs = share_specs(specs, config, share, cut)
    if cut == "inputs":
        return specs
    return [spec if spec.name.endswith(".qkv") else replace(spec, held_rows=None) for spec in specs]


def _is_of_stage(name: str, share: RankShare, cut: Cut) -> bool:
    """True if the parameter belongs to the rank's stage. In the cut "outputs" a later stage has those that embed or
    compute logits with no rows, and the final norm.
    """
    kind, _, rest = name.partition(".")
    if kind == "layers":
        layer = int(rest.partition(".")[0])
        return share.layers.first <= layer < share.layers.end
    return share.stage == 0 or cut == "outputs"


def _held_rows(name: str, config: ModelConfig, share: RankShare) -> RowOrder | None:
    """The rows of a parameter that the rank holds in the cut "outputs"; None for all.

    Rank 0 embeds; others hold rows of a tied embedding as their part of the output matrix.
    """
    match name.rpartition(".")[2].removesuffix("_bias"):
        case "qkv":
            return _rows_of_heads(config, share)
        case "sinks":
            return _rows(share.query_heads)
        case "q_norm" | "k_norm" if config.qk_norm_of != "head":
            return _rows_of_norm(name, config, share)
        case "o" | "down":
            return _rows(share.hidden)
        case "gate_up":
            return _rows_of_pair(config.intermediate_size, share.inner)
        case "up":
            return _rows(share.inner)
        case "lm_head":
            return _rows(share.vocab)
        case "embed" if share.rank > 0:
            return _rows(share.vocab if config.tied else Span(0, 0))
    return None


def _cut_by_inputs(spec: ParameterSpec, config: ModelConfig, share: RankShare) -> ParameterSpec:
    """The part of a parameter that the rank holds in the cut "inputs". A bias that is added after a sum is rank 0's."""
    owner, _, name = spec.name.rpartition(".")
    if owner.rpartition(".")[0].endswith(".experts"):
        expert = int(owner.rpartition(".")[2])
        return replace(spec, is_held=share.experts.first <= expert < share.experts.end)
    width, inner = config.intermediate_size, share.inner
    if owner.endswith(".shared") and config.experts is not None:
        width, inner = config.experts.shared_size, share.shared_inner
    match name.removesuffix("_bias"):
        case "qkv" | "q_b" | "key_up" | "value_up" if config.latent is not None:
            return replace(spec, held_rows=_rows_of_latent(name, config, config.latent, share))
        case "qkv":
            return replace(spec, held_rows=_rows_of_heads(config, share))
        case "sinks":
            return replace(spec, held_rows=_rows(share.query_heads))
        case "q_norm" | "k_norm" if config.qk_norm_of != "head":
            return replace(spec, held_rows=_rows_of_norm(name, config, share))
        case "gate_up":
            return replace(spec, held_rows=_rows_of_pair(width, inner))
        case "up":
            return replace(spec, held_rows=_rows(inner))
        case "o_norm":
            return replace(spec, held_rows=_rows_of_norm("q_norm", config, share))
        case "down_norm":
            return replace(spec, held_rows=_rows(inner))
        case "lm_head":
            return replace(spec, is_held=share.rank == 0)
        case "o" | "down" if not spec.is_matrix:  # a bias
            return replace(spec, is_held=share.tensor_rank == 0)
        case "o":
            queries, dim = share.query_heads, config.result_dim
            return replace(spec, held_inputs=Span(queries.first * dim, queries.count * dim))
        case "down":
            return replace(spec, held_inputs=inner)
    return spec


def _query_heads(config: ModelConfig, heads: Span, number: int, size: int) -> Span:
    """The query heads of a rank that holds these KV heads. Raises ConfigurationError if the copies of a KV head cannot
    divide its query heads.
    """
    ratio, num_copies = config.queries_per_kv_head, max(1, size // config.num_kv_heads)
    if ratio % num_copies:
        raise ConfigurationError(
            f"tensor_parallel {size} does not fit {ratio} query heads of each of {config.num_kv_heads} KV heads: use "
            f"{config.num_kv_heads} or fewer, or a multiple of it that divides {config.num_heads}"
        )
    count = heads.count * ratio // num_copies
    return Span(heads.first * ratio + number % num_copies * count, count)


def _rows_of_heads(config: ModelConfig, share: RankShare) -> RowOrder:
    """Rows of the merged projection [queries, keys, values] that belong to the rank's heads; gates of attention are
    between queries and keys.
    """
    dim = config.head_dim
    first_gate = config.num_heads * dim
    first_key = 2 * first_gate if config.attention_gate else first_gate
    first_value = first_key + config.num_kv_heads * dim
    queries = np.arange(share.query_heads.first * dim, share.query_heads.end * dim)
    gates = first_gate + queries if config.attention_gate else queries[:0]
    kv = np.arange(share.heads.first * dim, share.heads.end * dim)
    return np.concatenate((queries, gates, first_key + kv, first_value + kv))


def _rows_of_latent(name: str, config: ModelConfig, latent: LatentConfig, share: RankShare) -> RowOrder | None:
    """Rows of latent attention's parameters that the rank's query heads need. Every rank computes all latents."""
    if name == "qkv" and latent.query_rank:
        return None
    width = {"key_up": latent.plain_dim, "value_up": latent.value_dim}.get(name, config.rope.dim + latent.plain_dim)
    queries = np.arange(share.query_heads.first * width, share.query_heads.end * width)
    if name != "qkv":
        return queries
    return np.concatenate((queries, config.num_heads * width + np.arange(latent.kv_rank + config.rope.dim)))


def _rows_of_norm(name: str, config: ModelConfig, share: RankShare) -> RowOrder:
    """Weights of the rank's heads in the norms of queries or of keys."""
    heads = share.query_heads if name.endswith("q_norm") else share.heads
    return np.arange(heads.first * config.head_dim, heads.end * config.head_dim)


def _rows_of_pair(width: int, inner: Span) -> RowOrder:
    """Rows of the merged projection [gate, up], each of this `width`."""
    return np.concatenate((_rows(inner), width + _rows(inner)))


def _rows(span: Span) -> RowOrder:
    return np.arange(span.first, span.end)


def _part(width: int, rank: int, size: int) -> Span:
    """The rank's part of `width` outputs, cut at multiples of _UNIT. It may be empty."""
    num_units = -(-width // _UNIT)
    first, end = (min(width, num_units * number // size * _UNIT) for number in (rank, rank + 1))
    return Span(first, end - first)
