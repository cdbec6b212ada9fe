"""ForwardMetadata: the facts about a step that attention needs. An argument of every forward pass, never a global."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor


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


@dataclass(frozen=True, slots=True)
class ForwardMetadata:
    """The step's sequences, flattened. Sequences with one query come first, so their row equals their query index.

    Tensors are on the model's device; the integers are on the host, so reading them does not synchronise.
    """

    positions: Tensor  # [num_tokens] int64
    rope_lengths: Tensor  # [num_tokens] int64; see engine/models/rope.py
    slot_mapping: Tensor  # [num_tokens] int64: block_id * block_size + offset
    block_tables: Tensor  # [num_seqs, max_blocks] int32, padded with 0
    context_lens: Tensor  # [num_seqs] int32: tokens of each sequence, this step's included
    prompt_lens: Tensor  # [num_seqs] int32: tokens of the client's prompt; later tokens were generated
    query_starts: Tensor  # [num_seqs + 1] int32
    num_decodes: int
    chunks: tuple[Chunk, ...]
    max_decode_context: int
    masks: dict[object, Tensor] = field(default_factory=dict)  # built once per step, shared by its layers

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


def one_token() -> ForwardMetadata:
    """Metadata of a step with one token, the first of its sequence, in slot 0. Used to trigger compilation."""
    one, none = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    return ForwardMetadata(
        positions=none,
        rope_lengths=none + 1,
        slot_mapping=none,
        block_tables=torch.zeros((1, 1), dtype=torch.int32),
        context_lens=one,
        prompt_lens=one,
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        num_decodes=1,
        chunks=(),
        max_decode_context=1,
    )
