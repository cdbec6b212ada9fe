"""Attention over the paged KV cache on CPU: prompts in chunks, generated tokens one by one.

A generated token reads the cache in memory order, block by block, and copies none of it: scores of 16 keys at a time,
softmax, then a weighted sum of values (PagedAttention, Kwon et al. 2023, §4.3, on a CPU); see `decode_head.py`. Prompts
lay the keys of one head out as a packed matrix once and multiply tiles of queries with it; see `chunk_head.py`, and
`chunk_amx.py` for AMX. Keys are read from the cache only. So what a token gets depends on its sequence alone: not on
its batch, nor on how a prompt was cut, nor on whether it was decoded in its turn or computed again by a replay.
"""

from typing import Any, NamedTuple

import numpy as np

from engine.cpu.chunk_head import attend_chunk
from engine.cpu.decode_head import attend_decode
from engine.cpu.jit import jit
from engine.cpu.vectors import address


class HeadShape(NamedTuple):
    """Heads of a model and slots of its cache. `scale` has log2(e) in it; head_dim is a multiple of 16; `row_bytes`
    hold one head of one token.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    row_bytes: int
    block_size: int
    num_slots: int
    scale: Any


class Queries(NamedTuple):
    """Flat fp32 rows: `rows` [num_tokens, step], of which the first num_heads * head_dim are read; `out` [num_tokens,
    num_heads * head_dim]. TILE_ROWS rows beyond the last may be read.
    """

    rows: Any
    step: int
    out: Any


class AttentionScratch(NamedTuple):
    """Memory of one thread, flat fp32, or 16 bits for bf16; see Buffers.attention. Chunks use either `keys` and
    `values` or `keys16`, `values16` and `rows16`; the others are empty.
    """

    scores: Any
    keys: Any
    values: Any
    keys16: Any
    values16: Any
    rows16: Any
    tile: Any
    factors: Any
    limbs: Any  # bytes of split queries, see byte_vectors.split_query


class Attending(NamedTuple):
    """What a thread attends with, in all layers of a step. `batch`: engine.cpu.batch.Batch."""

    queries: Any
    shape: Any
    batch: Any
    scratch: Any


class LayerKV(NamedTuple):
    """One layer's keys and values: their addresses, a number of the cache's dtype, and the window in tokens."""

    keys: Any
    values: Any
    kind: Any
    window: Any


@jit
def attend(attending: Any, cache: Any, layer: Any, window: Any, share: Any) -> None:
    """Attention of one layer: a thread's share (index, count) of all sequences' heads."""
    shape, batch = attending.shape, attending.batch
    half_bytes = shape.num_slots * shape.num_kv_heads * shape.row_bytes
    keys = address(cache) + 2 * layer * half_bytes
    kv = LayerKV(keys, keys + half_bytes, cache[0], window)
    num_heads = shape.num_kv_heads
    num_items = _num_generated(batch) * num_heads
    begun, ended, item = num_items * share[0] // share[1], num_items * (share[0] + 1) // share[1], 0
    for seq in range(len(batch.context_lens)):
        row, end_row, num_prompt, position = _rows(batch, seq)
        if num_prompt:
            attend_chunk((seq, row, num_prompt, position), attending, kv, share)
        for generated in range(row + num_prompt, end_row):
            heads = (max(0, begun - item), min(num_heads, ended - item))
            if heads[0] < heads[1]:
                attend_decode((seq, generated, position + generated - row + 1), heads, attending, kv)
            item += num_heads


@jit
def _rows(batch: Any, seq: Any) -> Any:
    """Of a sequence: its first row, the row after its last, how many are of the prompt, the position of the first."""
    row, end_row = np.int64(batch.query_starts[seq]), np.int64(batch.query_starts[seq + 1])
    position = np.int64(batch.context_lens[seq]) - (end_row - row)
    return row, end_row, min(end_row - row, max(0, np.int64(batch.prompt_lens[seq]) - position)), position


@jit
def _num_generated(batch: Any) -> Any:
    total = 0
    for seq in range(len(batch.context_lens)):
        row, end_row, num_prompt, _ = _rows(batch, seq)
        total += end_row - row - num_prompt
    return total
