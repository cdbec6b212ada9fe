"""The contract of attention backends: what they need of a model (AttentionShape) and of a step (ForwardMetadata).

ForwardMetadata is an argument of every forward pass, never a global.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.kv.dtypes import as_bytes, pair_as_stored
from engine.models.model_config import ModelConfig
from mesh.domain.kv import Span


@dataclass(frozen=True, slots=True)
class Chunk:
    """A sequence that computes several tokens in this step.

    Its queries are rows `[query_start, query_start + num_queries)` of the step's tokens, and the last `num_queries` of
    the sequence's `context_len` tokens. `row` is its row in the block tables.
    """

    row: int
    query_start: int
    num_queries: int
    context_len: int

    @property
    def query_end(self) -> int:
        """Row after the last query."""
        return self.query_start + self.num_queries

    @property
    def first_position(self) -> int:
        """Position of the first query, which equals the number of tokens cached before this step."""
        return self.context_len - self.num_queries


class AdapterRows(NamedTuple):
    """Rows `[first, end)` of a step use the adapter in slot `slot`."""

    slot: int
    first: int
    end: int


class PassStates(NamedTuple):
    """The recurrent states of a step's sequences: the blocks that hold them, [num_seqs, state_blocks] int32, and how
    many tokens at the end of each sequence will be computed once more: the state that stays is the one before them.
    """

    tables: Tensor
    num_repeated: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForwardMetadata:
    """The step's sequences, flattened. Sequences with one query come first, so their row equals their query index.

    Tensors are on the model's device; the integers are on the host, so reading them does not synchronise.
    """

    positions: Tensor  # [num_tokens] int64
    rope_lengths: Tensor  # [num_tokens] int64; see engine/models/rope.py
    slot_mapping: Tensor  # [num_tokens * num_groups] int64: block_id * block_size + offset, of each token in each group
    block_tables: Tensor  # [num_seqs, num_groups * max_blocks] int32, padded with blocks that are valid to read
    context_lens: Tensor  # [num_seqs] int32: tokens of each sequence, this step's included
    prompt_lens: Tensor  # [num_seqs] int32: tokens of the prompt; later tokens were generated
    query_starts: Tensor  # [num_seqs + 1] int32
    num_decodes: int
    chunks: tuple[Chunk, ...]
    max_decode_context: int
    adapters: tuple[AdapterRows, ...] = ()  # in the order of their rows; rows of the base model are in none
    states: PassStates | None = None  # of a model with recurrent layers
    is_captured: bool = False  # the host must not read what the device computes
    masks: dict[object, Tensor] = field(default_factory=dict)  # built once per step, shared by its layers
    num_groups: int = 1  # see KVGroups; attention backends get the metadata of one group
    result_rows: Tensor | None = None  # [rows] int64, ascending: those whose result is read; None: all
    previous: Tensor | None = None  # [num_tokens, hidden_size], see ScheduledBatch

    def by_group(self) -> "list[ForwardMetadata]":
        """The metadata of each group."""
        if self.num_groups == 1:
            return [self]
        slots, tables = self.slot_mapping.view(-1, self.num_groups), self.block_tables.chunk(self.num_groups, 1)
        return [
            replace(self, slot_mapping=slots[:, group].contiguous(), block_tables=table, masks={}, num_groups=1)
            for group, table in enumerate(tables)
        ]

    @property
    def max_chunk_queries(self) -> int:
        """Largest number of queries of a chunk; 0 without chunks."""
        return max((chunk.num_queries for chunk in self.chunks), default=0)

    @property
    def max_chunk_context(self) -> int:
        """Longest context of a chunk; 0 without chunks."""
        return max((chunk.context_len for chunk in self.chunks), default=0)


def chunks_of(query_starts: Sequence[int], context_lens: Sequence[int], num_decodes: int) -> tuple[Chunk, ...]:
    """The chunks of a step: its sequences after the first `num_decodes`."""
    return tuple(
        Chunk(row, start, stop - start, context_lens[row])
        for row, (start, stop) in enumerate(pairwise(query_starts))
        if row >= num_decodes
    )


def one_token(num_groups: int = 1) -> ForwardMetadata:
    """Metadata of a step with one token, the first of its sequence, in slot 0. Used to trigger compilation."""
    one, none = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    return ForwardMetadata(
        positions=none,
        rope_lengths=none + 1,
        slot_mapping=none.repeat(num_groups),
        block_tables=torch.zeros((1, num_groups), dtype=torch.int32),
        context_lens=one,
        prompt_lens=one,
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        num_decodes=1,
        chunks=(),
        max_decode_context=1,
        num_groups=num_groups,
    )


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention heads of a model and the treatment of scores. Query head h reads key/value
    head h // queries_per_kv_head.

    Scores are multiplied by `scale`: `given_scale`, or head_dim ** -0.5 if None. With a softcap, score s becomes
    softcap * tanh(s / softcap). With `alibi`, each head's slope times the distance to the key is subtracted (ALiBi,
    Press et al. 2022). With sinks, each head has a number that counts as the score of one more key, whose value is 0.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    given_scale: float | None = None
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None
    has_sinks: bool = False

    @property
    def queries_per_kv_head(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.given_scale is None else self.given_scale

    def shard(self, kv_heads: Span, query_heads: Span | None = None) -> "AttentionShape":
        """The shape of a rank that holds only `kv_heads` and the query heads that read them; `query_heads` are some of
        these, if other ranks have copies of the KV heads and the rest.
        """
        queries_each = self.queries_per_kv_head
        queries = query_heads or Span(kv_heads.first * queries_each, kv_heads.count * queries_each)
        alibi = None if self.alibi is None else self.alibi[queries.first : queries.end]
        return replace(self, num_heads=queries.count, num_kv_heads=kv_heads.count, alibi=alibi)

    @property
    def is_plain(self) -> bool:
        """True if scores are scaled only: no softcap, no ALiBi, no sinks."""
        return self.softcap is None and self.alibi is None and not self.has_sinks


def attention_shape(config: ModelConfig) -> AttentionShape:
    """The attention shape of a decoder-only model, with the heads of all ranks."""
    return AttentionShape(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.attention_scale,
        config.attention_softcap,
        _alibi_slopes(config.num_heads, config.alibi_scale) if config.positions == "alibi" else None,
        config.attention_sinks,
    )


def _alibi_slopes(num_heads: int, factor: float) -> tuple[float, ...]:
    """A geometric sequence for the largest power of two <= num_heads; further slopes lie between its members."""
    power = 2 ** (num_heads.bit_length() - 1)
    first = 2.0 ** (-8.0 / power)
    between = 2.0 ** (-4.0 / power)
    slopes = [first ** (i + 1) for i in range(power)] + [between ** (2 * i + 1) for i in range(num_heads - power)]
    return tuple(slope * factor for slope in slopes)


class AttentionBackend(Protocol):
    """Plug point: writes a step's KV to the cache and computes attention over it."""

    name: str

    def write(self, keys: Tensor, values: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write keys and values to their slots of layer_cache, in place: with torch, for caches in floating point.

        keys, values: [num_tokens, num_kv_heads, head_dim], not necessarily contiguous. slot_mapping: [num_tokens].
        layer_cache: see `attend`.
        """
        slots = as_bytes(layer_cache).flatten(1, 2)  # [planes, num_slots, num_kv_heads, head_dim]
        pair = pair_as_stored(keys, values, layer_cache.dtype)
        for to, rows in zip(slots, pair[-len(slots) :], strict=True):  # with one plane, keys are values
            to.index_copy_(0, slot_mapping, as_bytes(rows))

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer_cache: Tensor,
        window: int | None,
        metadata: ForwardMetadata,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write keys and values to their slots, then attend causally -> [num_tokens, num_heads, head_dim].

        queries: [num_tokens, num_heads, head_dim]. keys, values: [num_tokens, num_kv_heads, head_dim], not necessarily
        contiguous. layer_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], written in place; [1, ...] if keys
        are values (see KVLayout). With a window, a query sees the last `window` positions, including its own. sinks:
        fp32 [num_heads] of a shape that has them. The caller owns the result.
        """
        ...
