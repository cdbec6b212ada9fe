"""Attention of a prompt's chunk on CPU: packed keys, tiles of queries, causal."""

from typing import Any

import numpy as np

from engine.cpu import chunk_amx
from engine.cpu.jit import jit
from engine.cpu.parts import head_of, read_keys, read_values
from engine.cpu.tiles import multiply_tile
from engine.cpu.vectors import FLOAT_BYTES, KEYS, address, exponents, scale_row

TILE_ROWS = 12
QUERY_BLOCK = 4 * TILE_ROWS
"""Queries that share one pass over the keys."""
KEY_TILE = 2 * KEYS
_VECTOR_BYTES = 64


@jit
def attend_chunk(chunk: Any, attending: Any, kv: Any, share: Any) -> None:
    """Queries of a sequence: its number, their first row, their count, the first one's position.

    `share` (index, count) says which part of the work is this thread's.
    """
    seq, row, count, position = chunk
    shape, batch = attending.shape, attending.batch
    group, end_row, context = shape.num_heads // shape.num_kv_heads, row + count, position + count
    first = max(0, position + 1 - kv.window) // KEY_TILE * KEY_TILE
    in_bf16 = len(attending.scratch.keys16) > 0
    size = chunk_amx.QUERY_BLOCK if in_bf16 else QUERY_BLOCK
    item = 0
    for kv_head in range(shape.num_kv_heads):
        packed = False
        for head in range(kv_head * group, (kv_head + 1) * group):
            for begun in range(row, end_row, size):
                item += 1
                if item % share[1] != share[0]:
                    continue
                block = (begun, min(size, end_row - begun), position + begun - row)
                if in_bf16:
                    if not packed:
                        chunk_amx.pack_head(batch.parts[seq], (first, context), kv_head, attending, kv)
                    chunk_amx.attend_block(block, head, (first, context), kv.window, attending)
                else:
                    if not packed:
                        _pack_head(batch.parts[seq], (first, context), kv_head, attending, kv)
                    _attend_block(block, head, (first, context), kv.window, attending)
                packed = True


@jit
def _pack_head(parts: Any, span: Any, kv_head: Any, attending: Any, kv: Any) -> None:
    """Keys of one head as panels [keys / 16][head_dim][16], values as panels [head_dim / 16][keys][16], of tokens
    [span[0], span[1]) and what fills the last tile up.
    """
    first, end = span
    shape, scratch = attending.shape, attending.scratch
    dim, step = shape.head_dim, shape.num_kv_heads * shape.row_bytes
    num_keys, tile, at = _padded(end - first), scratch.tile, address(scratch.tile)
    for token in range(first, first + num_keys, KEYS):
        place = head_of(parts[min(token, end - 1) // KEYS] * step, kv_head, shape, kv.kind)
        panel = scratch.keys[(token - first) * dim : (token - first + KEYS) * dim]
        read_keys(kv.keys + place, shape, panel, tile, kv.kind)
        read_values(kv.values + place, shape, at, kv.kind)
        for p in range(dim // 16):
            panel = scratch.values[(p * num_keys + token - first) * 16 : (p * num_keys + token - first + KEYS) * 16]
            for key in range(KEYS):
                for d in range(16):
                    panel[key * 16 + d] = tile[key * dim + p * 16 + d]


@jit
def _padded(num_keys: Any) -> Any:
    return (num_keys + KEY_TILE - 1) // KEY_TILE * KEY_TILE


@jit
def _attend_block(block: Any, head: Any, span: Any, window: Any, attending: Any) -> None:
    """One head of up to QUERY_BLOCK queries: `block` is their first row, their count and the first one's position,
    `span` the tokens whose keys are packed.
    """
    row, count, position = block
    queries, shape, _, scratch = attending
    first, scores, dim = span[0], scratch.scores, shape.head_dim
    begin = max(0, position + 1 - window - first) // KEY_TILE * KEY_TILE
    width = _padded(position + count - first) - begin
    rows, step = address(queries.rows) + (row * queries.step + head * dim) * FLOAT_BYTES, queries.step * FLOAT_BYTES
    for i in range(0, count, TILE_ROWS):
        left = (rows + i * step, step)
        # Keys behind a tile's last query are hidden from all of it.
        for key in range(0, _seen(i, position, first + begin, width), KEY_TILE):
            keys = (address(scratch.keys) + (begin + key) * dim * FLOAT_BYTES, KEYS * dim * FLOAT_BYTES)
            out = (address(scores) + (i * width + key) * FLOAT_BYTES, width * FLOAT_BYTES)
            multiply_tile((left, keys, out), dim, 12, 2, scores[0])
    for i in range(count):
        end = position + i + 1 - first - begin
        seen = (max(0, end - window), end)
        total = exponents(address(scores) + i * width * FLOAT_BYTES, width // KEYS, seen, shape.scale)
        scratch.factors[i] = np.float32(1.0) / total
    num_packed = _padded(span[1] - first)
    for i in range(0, count, TILE_ROWS):
        weights = (address(scores) + i * width * FLOAT_BYTES, width * FLOAT_BYTES)
        depth = _seen(i, position, first + begin, width)
        for p in range(0, dim // 16, 2):
            values = (address(scratch.values) + (p * num_packed + begin) * _VECTOR_BYTES, num_packed * _VECTOR_BYTES)
            places = (weights, values, (address(scratch.tile), KEY_TILE * FLOAT_BYTES))
            if p + 1 < dim // 16:
                multiply_tile(places, depth, 12, 2, scores[0])
            else:
                multiply_tile(places, depth, 12, 1, scores[0])
            at = ((row + i) * shape.num_heads + head) * dim + p * 16
            _put(scratch, queries.out, (i, min(TILE_ROWS, count - i), min(KEY_TILE, dim - p * 16)), at, shape)


@jit
def _seen(i: Any, position: Any, begin: Any, width: Any) -> Any:
    """Keys, from `begin` on, that the tile of queries from number `i` on may see."""
    return min(width, _padded(position + i + TILE_ROWS - begin))


@jit
def _put(scratch: Any, out: Any, part: Any, at: Any, shape: Any) -> None:
    """A tile of sums to the rows of `out`, each over its softmax's total; `part`: first query, rows, columns."""
    i, rows, columns = part
    for r in range(rows):
        to = address(out) + (at + r * shape.num_heads * shape.head_dim) * FLOAT_BYTES
        tile = address(scratch.tile) + r * KEY_TILE * FLOAT_BYTES
        scale_row(tile, columns // 16, scratch.factors[i + r], to)
