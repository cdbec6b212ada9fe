"""Attention over the paged KV cache on CPU: one query of each decoding sequence, and chunks of prompts.

Decodes read the cache in memory order, block by block, and copy none of it: scores of 16 keys at a time, softmax, then
a weighted sum of values (PagedAttention, Kwon et al. 2023, §4.3, on a CPU); see `decode_head.py`. A chunk lays the keys
of one head out as a packed matrix once and multiplies tiles of queries with it; see `chunk_head.py`, and `chunk_amx.py`
for AMX. Keys are read from the cache only, so a token sees the same values whether it came in a chunk, in a decode step
or over the network.
"""

from typing import Any, NamedTuple

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
    num_items = batch.num_decodes * num_heads
    item, end = num_items * share[0] // share[1], num_items * (share[0] + 1) // share[1]
    while item < end:
        first = item % num_heads
        past = min(num_heads, first + end - item)
        attend_decode(item // num_heads, (first, past), attending, kv)
        item += past - first
    for seq in range(batch.num_decodes, len(batch.context_lens)):
        attend_chunk(seq, attending, kv, share)
