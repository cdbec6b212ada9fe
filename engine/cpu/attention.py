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
from engine.cpu.vectors import KEYS, add_values, address, dot_keys, exponents, prefetch_rows, read_row

TILE_ROWS = 12
QUERY_BLOCK = 4 * TILE_ROWS
"""Queries of a chunk that share one pass over the keys."""
KEY_TILE = 2 * KEYS
_HIDDEN = np.float32(-np.inf)
_FLOAT_BYTES = 4


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
    for item in range(share[0], batch.num_decodes * shape.num_kv_heads, share[1]):
        seq, kv_head = item // shape.num_kv_heads, item % shape.num_kv_heads
        _attend_decode(seq, kv_head, queries, halves, kind, window, shape, batch, scratch)
    for seq in range(batch.num_decodes, len(batch.context_lens)):
        _attend_chunk(seq, queries, halves, kind, window, shape, batch, scratch, share)


@jit
def _attend_decode(seq: int, kv_head: int, queries: Any, halves: Any, kind: Any, window: int, shape: Any, batch: Any, scratch: Any) -> None:
    """The query of sequence `seq` for the query heads that share `kv_head`."""
    dim, group = shape.head_dim, shape.num_heads // shape.num_kv_heads
    step, head_at = shape.num_kv_heads * shape.row_bytes, kv_head * shape.row_bytes
    end = np.int64(batch.context_lens[seq])
    start = max(0, end - window)
    first, last = start // KEYS, (end + KEYS - 1) // KEYS
    width = (last - first) * KEYS
    scores, tile, parts = address(scratch.scores), address(scratch.tile), batch.parts[seq, first:last]
    query = address(queries.queries) + (seq * queries.step + kv_head * group * dim) * _FLOAT_BYTES
    for i in range(len(parts)):
        ahead = parts[min(i + 1, len(parts) - 1)]
        prefetch_rows(halves[0] + ahead * step + head_at, step, shape.row_bytes)
        at = halves[0] + parts[i] * step + head_at
        _score(query, at, step, dim, scores + i * KEYS * _FLOAT_BYTES, width * _FLOAT_BYTES, group, tile, kind)
    for g in range(group):
        scratch.scores[g * width : g * width + start - first * KEYS] = _HIDDEN
        scratch.scores[g * width + end - first * KEYS : (g + 1) * width] = _HIDDEN
        scratch.factors[g] = np.float32(1.0) / exponents(scores + g * width * _FLOAT_BYTES, width // KEYS, shape.scale)
    out_at = (seq * shape.num_heads + kv_head * group) * dim
    out = address(queries.out) + out_at * _FLOAT_BYTES
    queries.out[out_at : out_at + group * dim] = np.float32(0.0)
    for i in range(len(parts)):
        ahead = parts[min(i + 1, len(parts) - 1)]
        prefetch_rows(halves[1] + ahead * step + head_at, step, shape.row_bytes)
        at = halves[1] + parts[i] * step + head_at
        _add(scores + i * KEYS * _FLOAT_BYTES, width * _FLOAT_BYTES, at, step, dim, out, group, tile, kind)
    for g in range(group):
        head = queries.out[out_at + g * dim : out_at + (g + 1) * dim]
        for d in range(dim):
            head[d] *= scratch.factors[g]


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
    for key in range(KEYS):
        read_row(rows + key * step, dim // KEYS, tile + key * dim * _FLOAT_BYTES, kind)
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
    for key in range(KEYS):
        read_row(rows + key * step, dim // KEYS, tile + key * dim * _FLOAT_BYTES, kind)
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
        for key in range(KEYS):
            read_row(halves[0] + place + key * step, dim // KEYS, tile, kind)
            for d in range(dim):
                panel[d * KEYS + key] = scratch.tile[d]
            read_row(halves[1] + place + key * step, dim // KEYS, tile, kind)
            for p in range(dim // 16):
                at = (p * num_keys + token - first + key) * 16
                for d in range(16):
                    scratch.values[at + d] = scratch.tile[p * 16 + d]


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
