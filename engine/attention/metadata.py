"""What attention must know about a step. An argument of every forward pass, never a global."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A sequence that computes several tokens: where its queries are, and how far its context reaches.

    Queries are rows `[query_start, query_start + num_queries)` of the step's tokens and the last `num_queries` of
    the `context_len` tokens of the sequence. `row` is its row in the block tables.
    """

    row: int
    query_start: int
    num_queries: int
    context_len: int

    @property
    def query_end(self) -> int:
        """First row after the queries."""
        return self.query_start + self.num_queries

    @property
    def first_position(self) -> int:
        """Position of the first query; as many tokens were in the cache before."""
        return self.context_len - self.num_queries


@dataclass(frozen=True, slots=True)
class ForwardMetadata:
    """The step's sequences, flattened. Sequences with one query come first and have row = query index.

    Tensors are on the model's device; the integers are known to the host without waiting for it.
    """

    positions: Tensor  # [num_tokens] int64
    rope_lengths: Tensor  # [num_tokens] int64; see engine/models/rope.py
    slot_mapping: Tensor  # [num_tokens] int64: block_id * block_size + offset
    block_tables: Tensor  # [num_seqs, max_blocks] int32, padded with 0
    context_lens: Tensor  # [num_seqs] int32: tokens of each sequence once the step's are written
    prompt_lens: Tensor  # [num_seqs] int32: how many of them are the client's prompt; those after it were generated
    query_starts: Tensor  # [num_seqs + 1] int32
    num_decodes: int
    chunks: tuple[Chunk, ...]
    max_decode_context: int
    masks: dict[object, Tensor] = field(default_factory=dict)  # built once for a step, shared by its layers

    @property
    def max_chunk_queries(self) -> int:
        """Most queries of one chunk."""
        return max((chunk.num_queries for chunk in self.chunks), default=0)

    @property
    def max_chunk_context(self) -> int:
        """Longest context of a chunk."""
        return max((chunk.context_len for chunk in self.chunks), default=0)


def one_token() -> ForwardMetadata:
    """A step of one token, the first of its sequence, in slot 0: to compile with."""
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
