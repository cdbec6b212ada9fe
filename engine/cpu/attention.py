"""Attention over the paged KV cache on CPU: one query of each decoding sequence, and chunks of prompts.

Decodes read the cache in memory order, block by block, and copy none of it: scores of 16 keys at a time, softmax, then a
weighted sum of values (PagedAttention, Kwon et al. 2023, §4.3, on a CPU). A chunk lays the keys of one head out as a
packed matrix once and multiplies tiles of queries with it. Keys are read from the cache only, so a token sees the same
values whether it came in a chunk, in a decode step or over the network.
"""

from typing import Any, NamedTuple

import numpy as np

from engine.cpu.jit import jit
from engine.cpu.scalars import power_of_two
from engine.cpu.tiles import multiply_tile
from engine.cpu.vectors import KEYS, add_values, dot_keys, prefetch_rows, read_row, write_row

TILE_ROWS = 12
QUERY_BLOCK = 4 * TILE_ROWS
"""Queries of a chunk that share one pass over the keys."""
KEY_TILE = 2 * KEYS


class HeadShape(NamedTuple):
    """Heads of a model and slots of its cache. `scale` has log2(e) in it; head_dim is a multiple of 16; `row` is how
    many elements of the cache hold one head of one token.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    row: int
    block_size: int
    num_slots: int
    scale: Any


class Queries(NamedTuple):
    """Flat fp32 rows: `queries` [num_tokens, step], of which the first num_heads * head_dim are read; `out` [num_tokens,
    num_heads * head_dim]. QUERY_BLOCK rows beyond the last may be read.
    """

    queries: Any
    step: int
    out: Any


class AttentionScratch(NamedTuple):
    """Memory of one thread, flat fp32; see `scratch_sizes`."""

    scores: Any
    keys: Any
    values: Any
    tile: Any
    factors: Any


@jit
def attend(queries: Any, cache: Any, layer: int, window: int, shape: Any, batch: Any, scratch: Any, share: Any) -> None:
    """Attention of one layer: a thread's share (index, count) of all sequences' heads. `batch`: engine.cpu.batch.Batch."""
    for item in range(share[0], batch.num_decodes * shape.num_kv_heads, share[1]):
        seq, kv_head = item // shape.num_kv_heads, item % shape.num_kv_heads
        _attend_decode(seq, kv_head, queries, cache, layer, window, shape, batch, scratch)
    for seq in range(batch.num_decodes, len(batch.context_lens)):
        _attend_chunk(seq, queries, cache, layer, window, shape, batch, scratch, share)


@jit
def write_heads(keys: Any, values: Any, slots: Any, cache: Any, shape: Any) -> None:
    """Keys and values [num_tokens, num_kv_heads, head_dim] to their slots of a one-layer cache."""
    half_layer = shape.num_slots * shape.num_kv_heads * shape.row
    keys, values = keys.reshape(-1), values.reshape(-1)
    for token in range(len(slots)):
        for head in range(shape.num_kv_heads):
            at = (token * shape.num_kv_heads + head) * shape.head_dim
            to = (slots[token] * shape.num_kv_heads + head) * shape.row
            write_row((keys, at), shape.head_dim // 16, (cache, to))
            write_row((values, at), shape.head_dim // 16, (cache, to + half_layer))


@jit
def _attend_decode(seq: int, kv_head: int, queries: Any, cache: Any, layer: int, window: int, shape: Any, batch: Any, scratch: Any) -> None:
    """The query of sequence `seq` for the query heads that share `kv_head`."""
    dim, size = shape.head_dim, shape.block_size
    group, token_step = shape.num_heads // shape.num_kv_heads, shape.num_kv_heads * shape.row
    half_layer = shape.num_slots * token_step
    keys_at = 2 * layer * half_layer + kv_head * shape.row
    end = np.int64(batch.context_lens[seq])
    start = max(0, end - window)
    first, last = start // KEYS, (end + KEYS - 1) // KEYS
    width = (last - first) * KEYS
    head_at = seq * queries.step + kv_head * group * dim
    for part in range(first, last):
        at = keys_at + _slot(batch, seq, part * KEYS, size) * token_step
        following = keys_at + _slot(batch, seq, min(part + 1, last - 1) * KEYS, size) * token_step
        prefetch_rows((cache, following), token_step, shape.row)
        for g in range(group):
            score_at = g * width + (part - first) * KEYS
            dot_keys((queries.queries, head_at + g * dim), (cache, at), token_step, dim // 16, (scratch.scores, score_at))
    out_at = (seq * shape.num_heads + kv_head * group) * dim
    for g in range(group):
        row = scratch.scores[g * width : (g + 1) * width]
        total = _weigh(row, start - first * KEYS, end - first * KEYS, shape.scale)
        for j in range(width):
            row[j] /= total
    queries.out[out_at : out_at + group * dim] = np.float32(0.0)
    for part in range(first, last):
        at = keys_at + half_layer + _slot(batch, seq, part * KEYS, size) * token_step
        following = keys_at + half_layer + _slot(batch, seq, min(part + 1, last - 1) * KEYS, size) * token_step
        prefetch_rows((cache, following), token_step, shape.row)
        for g in range(group):
            score_at = g * width + (part - first) * KEYS
            add_values((scratch.scores, score_at), (cache, at), token_step, dim // 16, (queries.out, out_at + g * dim))


@jit
def _slot(batch: Any, seq: int, token: int, size: int) -> Any:
    return np.int64(batch.tables[seq, token // size]) * size + token % size


@jit
def _weigh(scores: Any, start: int, end: int, scale: Any) -> Any:
    """exp of scores [start, end) relative to their largest, in place, and 0 elsewhere; returns their sum."""
    seen = scores[start:end]
    highest = seen[0]
    for j in range(len(seen)):
        highest = max(highest, seen[j])
    total = np.float32(0.0)
    for j in range(len(seen)):
        seen[j] = power_of_two((seen[j] - highest) * scale)
    for j in range(len(seen)):
        total += seen[j]
    scores[:start] = np.float32(0.0)
    scores[end:] = np.float32(0.0)
    return total


@jit
def _attend_chunk(seq: int, queries: Any, cache: Any, layer: int, window: int, shape: Any, batch: Any, scratch: Any, share: Any) -> None:
    """All queries of sequence `seq`, causally; `share` (index, count) says which part of the work is this thread's."""
    dim, group = shape.head_dim, shape.num_heads // shape.num_kv_heads
    row, end_row = np.int64(batch.query_starts[seq]), np.int64(batch.query_starts[seq + 1])
    position = np.int64(batch.context_lens[seq]) - (end_row - row)
    item = 0
    for kv_head in range(shape.num_kv_heads):
        first = max(0, position + 1 - window) // KEY_TILE * KEY_TILE
        packed = False
        for head in range(kv_head * group, (kv_head + 1) * group):
            for begun in range(row, end_row, QUERY_BLOCK):
                item += 1
                if item % share[1] != share[0]:
                    continue
                if not packed:
                    _pack_head(seq, kv_head, first, cache, layer, shape, batch, scratch)
                    packed = True
                count = min(QUERY_BLOCK, end_row - begun)
                _attend_block((begun, count, position + begun - row, first), head, queries, window, shape, scratch, batch.context_lens[seq])


@jit
def _pack_head(seq: int, kv_head: int, first: int, cache: Any, layer: int, shape: Any, batch: Any, scratch: Any) -> None:
    """Keys of one head as panels [keys / 16][head_dim][16], values as panels [head_dim / 16][keys][16], from `first` on."""
    dim, token_step = shape.head_dim, shape.num_kv_heads * shape.row
    half_layer = shape.num_slots * token_step
    at = 2 * layer * half_layer + kv_head * shape.row
    end = np.int64(batch.context_lens[seq])
    num_keys = _padded(end - first)
    for token in range(first, first + num_keys, KEYS):
        slot = _slot(batch, seq, min(token, (end - 1) // KEYS * KEYS), shape.block_size)
        for key in range(KEYS):
            j = token - first + key
            place = at + (slot + key) * token_step
            read_row((cache, place), dim // 16, (scratch.tile, 0))
            panel = scratch.keys[(token - first) * dim : (token - first + KEYS) * dim]
            for d in range(dim):
                panel[d * KEYS + key] = scratch.tile[d]
            read_row((cache, place + half_layer), dim // 16, (scratch.tile, 0))
            for p in range(dim // 16):
                scratch.values[(p * num_keys + j) * 16 : (p * num_keys + j + 1) * 16] = scratch.tile[p * 16 : p * 16 + 16]


@jit
def _padded(num_keys: int) -> Any:
    return (num_keys + KEY_TILE - 1) // KEY_TILE * KEY_TILE


@jit
def _attend_block(block: Any, head: int, queries: Any, window: int, shape: Any, scratch: Any, context: int) -> None:
    """One head of up to QUERY_BLOCK queries; `block`: first row, count, position of the first, first packed key."""
    row, count, position, first = block
    dim = shape.head_dim
    num_packed = _padded(np.int64(context) - first)
    begin = max(0, position + 1 - window - first) // KEY_TILE * KEY_TILE
    width = _padded(position + count - first) - begin
    scores = scratch.scores
    for i in range(0, count, TILE_ROWS):
        at = (row + i) * queries.step + head * dim
        for key in range(0, width, KEY_TILE):
            multiply_tile((queries.queries, at), queries.step, (scratch.keys, (begin + key) * dim), KEYS * dim, dim, (scores, i * width + key), width, 12, 2)
    for i in range(count):
        end = position + i + 1 - first - begin
        total = _weigh(scores[i * width : (i + 1) * width], max(0, end - window), end, shape.scale)
        scratch.factors[i] = np.float32(1.0) / total
    for p in range(0, dim // 16, 2):
        for i in range(0, count, TILE_ROWS):
            panel_at = (p * num_packed + begin) * 16
            if p + 1 < dim // 16:
                multiply_tile((scores, i * width), width, (scratch.values, panel_at), num_packed * 16, width, (scratch.tile, 0), 32, 12, 2)
            else:
                multiply_tile((scores, i * width), width, (scratch.values, panel_at), num_packed * 16, width, (scratch.tile, 0), 32, 12, 1)
            columns = min(32, dim - p * 16)
            for r in range(min(TILE_ROWS, count - i)):
                at = (row + i + r) * shape.num_heads * dim + head * dim + p * 16
                for j in range(columns):
                    queries.out[at + j] = scratch.tile[r * 32 + j] * scratch.factors[i + r]
