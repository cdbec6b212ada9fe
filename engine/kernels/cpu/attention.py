"""Attention over the paged KV cache on CPU: prompts in chunks, generated tokens one by one.

A generated token reads the cache in memory order, block by block, and copies nothing: scores of 16 keys at a time,
softmax, then a weighted sum of values (PagedAttention, Kwon et al. 2023, §4.3, on a CPU); see `decode_head.py`. For a
prompt, the keys of one head are packed into panels once and multiplied with tiles of queries; see `chunk_head.py`, and
`chunk_amx.py` for AMX.

Keys are read from the cache only. A token's result therefore depends on its sequence alone: not on its batch, not on
how the prompt was chunked, and not on whether the token was decoded or recomputed by a replay.
"""

from typing import Any, NamedTuple

import numpy as np

from engine.kernels.cpu.arguments import Share, Span
from engine.kernels.cpu.batch import Attending, Batch, Cache, LayerKV
from engine.kernels.cpu.chunk_head import Chunk, attend_chunk
from engine.kernels.cpu.decode_head import DecodeQuery, attend_decode
from engine.kernels.cpu.jit import jit
from engine.kernels.cpu.vectors import address

_int64: Any = np.int64
"""Widens in compiled code: the batch holds int32."""


class _SequenceRows(NamedTuple):
    """Rows of one sequence in the batch: those of its prompt, then generated ones."""

    first: int
    end: int
    num_prompt: int
    position: int  # of the first row


@jit
def attend(attending: Attending, cache: Cache, layer: int, window: int, share: Share) -> None:
    """Compute one thread's share of a layer's attention, for all sequences of the batch."""
    shape, batch = attending.shape, attending.batch
    half_bytes = shape.num_slots * shape.num_kv_heads * shape.row_bytes
    keys = address(cache) + 2 * layer * half_bytes
    kv = LayerKV(keys, keys + half_bytes, cache[0], window)
    num_heads = shape.num_kv_heads
    num_items = _num_generated(batch) * num_heads
    first_item, end_item, item = (
        num_items * share.number // share.num_shares,
        num_items * (share.number + 1) // share.num_shares,
        0,
    )
    for seq in range(len(batch.context_lens)):
        rows = _rows(batch, seq)
        if rows.num_prompt:
            attend_chunk(Chunk(seq, rows.first, rows.num_prompt, rows.position), attending, kv, share)
        for row in range(rows.first + rows.num_prompt, rows.end):
            heads = Span(max(0, first_item - item), min(num_heads, end_item - item))
            if heads.first < heads.end:
                attend_decode(DecodeQuery(seq, row, rows.position + row - rows.first + 1), heads, attending, kv)
            item += num_heads


@jit
def _rows(batch: Batch, seq: int) -> _SequenceRows:
    first, end = _int64(batch.query_starts[seq]), _int64(batch.query_starts[seq + 1])
    position = _int64(batch.context_lens[seq]) - (end - first)
    num_prompt = min(end - first, max(0, _int64(batch.prompt_lens[seq]) - position))
    return _SequenceRows(first, end, num_prompt, position)


@jit
def _num_generated(batch: Batch) -> int:
    total = 0
    for seq in range(len(batch.context_lens)):
        rows = _rows(batch, seq)
        total += rows.end - rows.first - rows.num_prompt
    return total
