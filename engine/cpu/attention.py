"""Attention over the paged KV cache on CPU: one query of each decoding sequence, and chunks of prompts.

Decodes read the cache in memory order, block by block, and copy none of it: scores of 16 keys at a time, softmax, then a
weighted sum of values (PagedAttention, Kwon et al. 2023, §4.3, on a CPU). A chunk lays the keys of one head out as a
packed matrix once and multiplies tiles of queries with it. Keys are read from the cache only, so a token sees the same
values whether it came in a chunk, in a decode step or over the network.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from engine.cpu.jit import OPTIONS, jit
from engine.cpu.tiles import multiply_tile
from engine.cpu.vectors import KEYS, add_values, address, dot_keys, exponents, prefetch, read_rows

TILE_ROWS = 12
QUERY_BLOCK = 4 * TILE_ROWS
"""Queries of a chunk that share one pass over the keys."""
KEY_TILE = 2 * KEYS
_HIDDEN = np.float32(-np.inf)
_FLOAT_BYTES = 4
_AHEAD = 2
"""Blocks of keys that are asked for before they are needed."""


class HeadShape(NamedTuple):
    """Heads of a model and slots of its cache. `scale` has log2(e) in it; head_dim is a multiple of 16; `row_bytes` hold
    one head of one token.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    row_bytes: int
    block_size: int
    num_slots: int
    scale: Any


class Queries(NamedTuple):
    """Flat fp32 rows: `queries` [num_tokens, step], of which the first num_heads * head_dim are read; `out` [num_tokens,
    num_heads * head_dim]. TILE_ROWS rows beyond the last may be read.
    """

    queries: Any
    step: int
    out: Any


class AttentionScratch(NamedTuple):
    """Memory of one thread, flat fp32; see Buffers.attention."""

    scores: Any
    keys: Any
    values: Any
    tile: Any
    factors: Any


@jit
def attend(queries: Any, cache: Any, layer: int, window: int, shape: Any, batch: Any, scratch: Any, share: Any) -> None:
    """Attention of one layer: a thread's share (index, count) of all sequences' heads. `batch`: engine.cpu.batch.Batch."""
    half_bytes = shape.num_slots * shape.num_kv_heads * shape.row_bytes
    halves = (address(cache) + 2 * layer * half_bytes, address(cache) + (2 * layer + 1) * half_bytes)
    kind = cache[0]
    num_heads = shape.num_kv_heads
    num_items = batch.num_decodes * num_heads
    item, end = num_items * share[0] // share[1], num_items * (share[0] + 1) // share[1]
    while item < end:
        heads = (item % num_heads, min(num_heads, item % num_heads + end - item))
        _attend_decode(item // num_heads, heads, queries, halves, kind, window, shape, batch, scratch)
        item += heads[1] - heads[0]
    for seq in range(batch.num_decodes, len(batch.context_lens)):
        _attend_chunk(seq, queries, halves, kind, window, shape, batch, scratch, share)


@jit
def _attend_decode(seq: int, heads: Any, queries: Any, halves: Any, kind: Any, window: int, shape: Any, batch: Any, scratch: Any) -> None:
    """The query of sequence `seq` for the query heads that share key/value heads [heads[0], heads[1])."""
    dim, group = shape.head_dim, shape.num_heads // shape.num_kv_heads
    step, num_kv_heads = shape.num_kv_heads * shape.row_bytes, heads[1] - heads[0]
    end = np.int64(batch.context_lens[seq])
    start = max(0, end - window)
    first, last = start // KEYS, (end + KEYS - 1) // KEYS
    width = (last - first) * KEYS
    row_bytes, group_bytes, head_bytes = width * _FLOAT_BYTES, group * width * _FLOAT_BYTES, group * dim * _FLOAT_BYTES
    scores, tile, parts = address(scratch.scores), address(scratch.tile), batch.parts[seq, first:last]
    query = address(queries.queries) + seq * queries.step * _FLOAT_BYTES + heads[0] * head_bytes
    skipped = heads[0] * shape.row_bytes
    for i in range(len(parts)):
        prefetch(halves[0] + parts[min(i + _AHEAD, len(parts) - 1)] * step, KEYS * step)
        at, out = halves[0] + parts[i] * step + skipped, scores + i * KEYS * _FLOAT_BYTES
        for head in range(num_kv_heads):
            given = (query + head * head_bytes, at + head * shape.row_bytes, out + head * group_bytes)
            _score(given[0], given[1], step, dim, given[2], row_bytes, group, tile, kind)
    num_rows = num_kv_heads * group
    for g in range(num_rows):
        scratch.scores[g * width : g * width + start - first * KEYS] = _HIDDEN
        scratch.scores[g * width + end - first * KEYS : (g + 1) * width] = _HIDDEN
        scratch.factors[g] = np.float32(1.0) / exponents(scores + g * row_bytes, width // KEYS, shape.scale)
    out_at = (seq * shape.num_heads + heads[0] * group) * dim
    queries.out[out_at : out_at + num_rows * dim] = np.float32(0.0)
    for i in range(len(parts)):
        prefetch(halves[1] + parts[min(i + _AHEAD, len(parts) - 1)] * step, KEYS * step)
        at, weights = halves[1] + parts[i] * step + skipped, scores + i * KEYS * _FLOAT_BYTES
        for head in range(num_kv_heads):
            out = address(queries.out) + out_at * _FLOAT_BYTES + head * head_bytes
            _add(weights + head * group_bytes, row_bytes, at + head * shape.row_bytes, step, dim, out, group, tile, kind)
    for g in range(num_rows):
        values = queries.out[out_at + g * dim : out_at + (g + 1) * dim]
        for d in range(dim):
            values[d] *= scratch.factors[g]


def _score(query: int, rows: int, step: int, dim: int, out: int, out_step: int, group: int, tile: int, kind: Any) -> None:
    """Scores of 16 keys for the `group` query heads that share them."""
    raise NotImplementedError


@overload(_score, jit_options=OPTIONS)
def _overload_score(query: int, rows: int, step: int, dim: int, out: int, out_step: int, group: int, tile: int, kind: Any) -> Any:
    return _score_floats if kind == types.float32 else _score_small


def _score_floats(query: int, rows: int, step: int, dim: int, out: int, out_step: int, group: int, tile: int, kind: Any) -> None:
    for g in range(group):
        dot_keys(query + g * dim * _FLOAT_BYTES, rows, step, dim // KEYS, out + g * out_step)


def _score_small(query: int, rows: int, step: int, dim: int, out: int, out_step: int, group: int, tile: int, kind: Any) -> None:
    # Converted once for all query heads that share them.
    read_rows(rows, step, dim // KEYS, tile, kind)
    for g in range(group):
        dot_keys(query + g * dim * _FLOAT_BYTES, tile, dim * _FLOAT_BYTES, dim // KEYS, out + g * out_step)


def _add(weights: int, weight_step: int, rows: int, step: int, dim: int, out: int, group: int, tile: int, kind: Any) -> None:
    """Add 16 value rows, weighted, to the outputs of the `group` query heads that share them."""
    raise NotImplementedError


@overload(_add, jit_options=OPTIONS)
def _overload_add(weights: int, weight_step: int, rows: int, step: int, dim: int, out: int, group: int, tile: int, kind: Any) -> Any:
    return _add_floats if kind == types.float32 else _add_small


def _add_floats(weights: int, weight_step: int, rows: int, step: int, dim: int, out: int, group: int, tile: int, kind: Any) -> None:
    for g in range(group):
        add_values(weights + g * weight_step, rows, step, dim // KEYS, out + g * dim * _FLOAT_BYTES)


def _add_small(weights: int, weight_step: int, rows: int, step: int, dim: int, out: int, group: int, tile: int, kind: Any) -> None:
    read_rows(rows, step, dim // KEYS, tile, kind)
    for g in range(group):
        add_values(weights + g * weight_step, tile, dim * _FLOAT_BYTES, dim // KEYS, out + g * dim * _FLOAT_BYTES)


@jit
def _attend_chunk(seq: int, queries: Any, halves: Any, kind: Any, window: int, shape: Any, batch: Any, scratch: Any, share: Any) -> None:
    """All queries of sequence `seq`, causally; `share` (index, count) says which part of the work is this thread's."""
    group = shape.num_heads // shape.num_kv_heads
    row, end_row = np.int64(batch.query_starts[seq]), np.int64(batch.query_starts[seq + 1])
    context = np.int64(batch.context_lens[seq])
    position = context - (end_row - row)
    first = max(0, position + 1 - window) // KEY_TILE * KEY_TILE
    item = 0
    for kv_head in range(shape.num_kv_heads):
        packed = False
        for head in range(kv_head * group, (kv_head + 1) * group):
            for begun in range(row, end_row, QUERY_BLOCK):
                item += 1
                if item % share[1] != share[0]:
                    continue
                if not packed:
                    _pack_head(batch.parts[seq], (first, context), kv_head, halves, kind, shape, scratch)
                    packed = True
                block = (begun, min(QUERY_BLOCK, end_row - begun), position + begun - row, first)
                _attend_block(block, head, queries, window, shape, scratch, context)


@jit
def _pack_head(parts: Any, span: Any, kv_head: int, halves: Any, kind: Any, shape: Any, scratch: Any) -> None:
    """Keys of one head as panels [keys / 16][head_dim][16], values as panels [head_dim / 16][keys][16], of tokens
    [span[0], span[1]) and what fills the last tile up.
    """
    first, end = span
    dim, step, head_at = shape.head_dim, shape.num_kv_heads * shape.row_bytes, kv_head * shape.row_bytes
    num_keys, tile = _padded(end - first), address(scratch.tile)
    for token in range(first, first + num_keys, KEYS):
        place = parts[min(token, end - 1) // KEYS] * step + head_at
        panel = scratch.keys[(token - first) * dim : (token - first + KEYS) * dim]
        read_rows(halves[0] + place, step, dim // KEYS, tile, kind)
        for d in range(dim):
            for key in range(KEYS):
                panel[d * KEYS + key] = scratch.tile[key * dim + d]
        read_rows(halves[1] + place, step, dim // KEYS, tile, kind)
        for p in range(dim // 16):
            for key in range(KEYS):
                at = (p * num_keys + token - first + key) * 16
                for d in range(16):
                    scratch.values[at + d] = scratch.tile[key * dim + p * 16 + d]


@jit
def _padded(num_keys: int) -> Any:
    return (num_keys + KEY_TILE - 1) // KEY_TILE * KEY_TILE


@jit
def _attend_block(block: Any, head: int, queries: Any, window: int, shape: Any, scratch: Any, context: int) -> None:
    """One head of up to QUERY_BLOCK queries; `block`: first row, count, position of the first, first packed key."""
    row, count, position, first = block
    dim, scores = shape.head_dim, scratch.scores
    num_packed = _padded(context - first)
    begin = max(0, position + 1 - window - first) // KEY_TILE * KEY_TILE
    width = _padded(position + count - first) - begin
    for i in range(0, count, TILE_ROWS):
        at = (row + i) * queries.step + head * dim
        # Keys behind a tile's last query are hidden from all of it.
        for key in range(0, min(width, _padded(position + i + TILE_ROWS - first) - begin), KEY_TILE):
            keys = (scratch.keys, (begin + key) * dim)
            multiply_tile((queries.queries, at), queries.step, keys, KEYS * dim, dim, (scores, i * width + key), width, 12, 2)
    for i in range(count):
        end = position + i + 1 - first - begin
        scores[i * width : i * width + max(0, end - window)] = _HIDDEN
        scores[i * width + end : (i + 1) * width] = _HIDDEN
        scratch.factors[i] = np.float32(1.0) / exponents(address(scores) + i * width * _FLOAT_BYTES, width // KEYS, shape.scale)
    for i in range(0, count, TILE_ROWS):
        depth = min(width, _padded(position + i + TILE_ROWS - first) - begin)
        for p in range(0, dim // 16, 2):
            values, tile = (scratch.values, (p * num_packed + begin) * 16), (scratch.tile, 0)
            if p + 1 < dim // 16:
                multiply_tile((scores, i * width), width, values, num_packed * 16, depth, tile, KEY_TILE, 12, 2)
            else:
                multiply_tile((scores, i * width), width, values, num_packed * 16, depth, tile, KEY_TILE, 12, 1)
            columns = min(KEY_TILE, dim - p * 16)
            for r in range(min(TILE_ROWS, count - i)):
                at = ((row + i + r) * shape.num_heads + head) * dim + p * 16
                for j in range(columns):
                    queries.out[at + j] = scratch.tile[r * KEY_TILE + j] * scratch.factors[i + r]
