"""Causal attention of a prompt's chunk on CPU: packed keys, tiles of queries.

It is computed in fp32 or, for models in int8 on a CPU with AMX, with AMX's bf16 tiles. bf16 numbers are kept as their
16 bits. Sums of products and the softmax are fp32 in both.
"""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.amx import multiply_bf16_tile
from engine.kernels.cpu.arguments import (
    Attending,
    AttentionScratch,
    Int64s,
    LayerKV,
    Matrix,
    Part,
    Queries,
    QueryBlock,
    Range,
)
from engine.kernels.cpu.compiler import address, jit
from engine.kernels.cpu.kv_segments import head_of, read_keys, read_values
from engine.kernels.cpu.machine import (
    AMX_DEPTH,
    AMX_QUERY_BLOCK,
    FLOAT_BYTES,
    HALF_BYTES,
    KEY_TILE,
    KEYS,
    LANES,
    QUERY_BLOCK,
    QUERY_TILE_ROWS,
    VECTOR_BYTES,
)
from engine.kernels.cpu.tiles import TileProduct, multiply_tile
from engine.kernels.cpu.vectors import exponents, pair_rows, scale_row, to_bf16


class Chunk(NamedTuple):
    """Prompt tokens of one sequence that are computed in this step."""

    seq: int
    row: int  # of the first token
    num_rows: int
    position: int  # of the first token


class _TileColumns(NamedTuple):
    """Columns of the tile of sums that go to `out`: queries from `first` on."""

    first: int
    num_rows: int
    num_columns: int


@jit
def attend_chunk(chunk: Chunk, attending: Attending, kv: LayerKV, part: Part) -> None:
    """Compute one thread's part of a chunk: every part.num_parts-th block of queries of a head."""
    seq, row, count, position = chunk
    shape, batch = attending.shape, attending.batch
    group, end_row, context = shape.num_heads // shape.num_kv_heads, row + count, position + count
    first = max(0, position + 1 - kv.window) // KEY_TILE * KEY_TILE
    tokens = Range(first, context)
    in_bf16 = len(attending.scratch.keys16) > 0
    size = AMX_QUERY_BLOCK if in_bf16 else QUERY_BLOCK
    item = 0
    for kv_head in range(shape.num_kv_heads):
        packed = False
        for head in range(kv_head * group, (kv_head + 1) * group):
            for block_row in range(row, end_row, size):
                item += 1
                if item % part.num_parts != part.number:
                    continue
                block = QueryBlock(block_row, min(size, end_row - block_row), position + block_row - row)
                if in_bf16:
                    if not packed:
                        pack_head_bf16(batch.segments[seq], tokens, kv_head, attending, kv)
                    attend_block_bf16(block, head, tokens, kv.window, attending)
                else:
                    if not packed:
                        _pack_head(batch.segments[seq], tokens, kv_head, attending, kv)
                    _attend_block(block, head, tokens, kv.window, attending)
                packed = True


@jit
def _pack_head(segments: Int64s, tokens: Range, kv_head: int, attending: Attending, kv: LayerKV) -> None:
    """Pack one head of the tokens into scratch, padded to whole key tiles with the last tokens' segment.

    Keys become panels [keys / 16][head_dim][16], values panels [head_dim / 16][keys][16].
    """
    first, end = tokens
    shape, scratch = attending.shape, attending.scratch
    dim, step = shape.head_dim, shape.num_kv_heads * shape.row_bytes
    num_keys, tile, at = padded_keys(end - first), scratch.tile, address(scratch.tile)
    for token in range(first, first + num_keys, KEYS):
        head = head_of(segments[min(token, end - 1) // KEYS] * step, kv_head, shape, kv.element)
        panel = scratch.keys[(token - first) * dim : (token - first + KEYS) * dim]
        read_keys(kv.keys + head, shape, panel, tile, kv.element)
        read_values(kv.values + head, shape, at, kv.element)
        for p in range(dim // LANES):
            start = p * num_keys + token - first
            panel = scratch.values[start * LANES : (start + KEYS) * LANES]
            for key in range(KEYS):
                for d in range(LANES):
                    panel[key * LANES + d] = tile[key * dim + p * LANES + d]


@jit
def _attend_block(block: QueryBlock, head: int, tokens: Range, window: int, attending: Attending) -> None:
    """Attend with up to QUERY_BLOCK queries of one head. tokens: those whose keys are packed."""
    row, count, position = block
    queries, shape, _, scratch = attending
    first, scores, dim = tokens.first, scratch.scores, shape.head_dim
    begin = max(0, position + 1 - window - first) // KEY_TILE * KEY_TILE
    width = padded_keys(position + count - first) - begin
    rows, step = address(queries.rows) + (row * queries.step + head * dim) * FLOAT_BYTES, queries.step * FLOAT_BYTES
    for i in range(0, count, QUERY_TILE_ROWS):
        left = Matrix(rows + i * step, step)
        # Keys after a tile's last query are hidden from the whole tile.
        for key in range(0, _num_visible(i, position, first + begin, width), KEY_TILE):
            keys = Matrix(address(scratch.keys) + (begin + key) * dim * FLOAT_BYTES, KEYS * dim * FLOAT_BYTES)
            out = Matrix(address(scores) + (i * width + key) * FLOAT_BYTES, width * FLOAT_BYTES)
            multiply_tile(TileProduct(left, keys, out), dim, QUERY_TILE_ROWS, 2, scores[0])
    for i in range(count):
        end = position + i + 1 - first - begin
        visible = Range(max(0, end - window), end)
        total = exponents(address(scores) + i * width * FLOAT_BYTES, width // KEYS, visible, shape.scale)
        scratch.factors[i] = np.float32(1.0) / total
    num_packed = padded_keys(tokens.end - first)
    sums = Matrix(address(scratch.tile), KEY_TILE * FLOAT_BYTES)
    for i in range(0, count, QUERY_TILE_ROWS):
        weights = Matrix(address(scores) + i * width * FLOAT_BYTES, width * FLOAT_BYTES)
        depth = _num_visible(i, position, first + begin, width)
        for p in range(0, dim // LANES, 2):
            at = address(scratch.values) + (p * num_packed + begin) * VECTOR_BYTES
            product = TileProduct(weights, Matrix(at, num_packed * VECTOR_BYTES), sums)
            if p + 1 < dim // LANES:
                multiply_tile(product, depth, QUERY_TILE_ROWS, 2, scores[0])
            else:
                multiply_tile(product, depth, QUERY_TILE_ROWS, 1, scores[0])
            at = (row + i) * queries.out_step + head * dim + p * LANES
            columns = _TileColumns(i, min(QUERY_TILE_ROWS, count - i), min(KEY_TILE, dim - p * LANES))
            _store_tile(scratch, queries, columns, at)


@jit
def _num_visible(i: int, position: int, begin: int, width: int) -> int:
    """Keys from position `begin` on that the tile of queries from number `i` on may see, in whole key tiles."""
    return min(width, padded_keys(position + i + QUERY_TILE_ROWS - begin))


@jit
def _store_tile(scratch: AttentionScratch, queries: Queries, columns: _TileColumns, at: int) -> None:
    """Divide a tile of sums by the softmax totals and store it in `queries.out` from index `at` on."""
    for r in range(columns.num_rows):
        target = address(queries.out) + (at + r * queries.out_step) * FLOAT_BYTES
        tile = address(scratch.tile) + r * KEY_TILE * FLOAT_BYTES
        scale_row(tile, columns.num_columns // LANES, scratch.factors[columns.first + r], target)


@jit
def pack_head_bf16(segments: Int64s, tokens: Range, kv_head: int, attending: Attending, kv: LayerKV) -> None:
    """Pack one head of the tokens into scratch, padded to whole key tiles with the last tokens' segment.

    Keys become panels [keys / 16][head_dim / 2][16][2], values panels [head_dim / 16][keys / 2][16][2].
    """
    first, end = tokens
    shape, scratch = attending.shape, attending.scratch
    dim, step = shape.head_dim, shape.num_kv_heads * shape.row_bytes
    num_keys = padded_keys(end - first)
    tile, spare, rows = scratch.tile, scratch.tile[KEYS * dim :], address(scratch.rows16)
    for token in range(first, first + num_keys, KEYS):
        head = head_of(segments[min(token, end - 1) // KEYS] * step, kv_head, shape, kv.element)
        read_keys(kv.keys + head, shape, tile, spare, kv.element)
        to_bf16(address(tile), dim, rows)
        panel = address(scratch.keys16) + (token - first) * dim * HALF_BYTES
        for d in range(0, dim, 2):
            row = rows + d * KEYS * HALF_BYTES
            pair_rows(row, row + KEYS * HALF_BYTES, 1, panel + d * KEYS * HALF_BYTES, 0)
        read_values(kv.values + head, shape, address(tile), kv.element)
        to_bf16(address(tile), KEYS * dim // LANES, rows)
        for key in range(0, KEYS, 2):
            row = rows + key * dim * HALF_BYTES
            out = address(scratch.values16) + (token - first + key) * LANES * HALF_BYTES
            pair_rows(row, row + dim * HALF_BYTES, dim // LANES, out, num_keys * LANES * HALF_BYTES)


@jit
def padded_keys(num_keys: int) -> int:
    """num_keys rounded up to whole key tiles."""
    return (num_keys + KEY_TILE - 1) // KEY_TILE * KEY_TILE


@jit
def attend_block_bf16(block: QueryBlock, head: int, tokens: Range, window: int, attending: Attending) -> None:
    """Attend with up to AMX_QUERY_BLOCK queries of one head. tokens: those whose keys are packed."""
    row, count, position = block
    queries, shape, _, scratch = attending
    first, dim, scores = tokens.first, shape.head_dim, scratch.scores
    begin = max(0, position + 1 - window - first) // KEY_TILE * KEY_TILE
    width = padded_keys(position + count - first) - begin
    for i in range(count):
        at = address(queries.rows) + ((row + i) * queries.step + head * dim) * FLOAT_BYTES
        to_bf16(at, dim // LANES, address(scratch.rows16) + i * dim * HALF_BYTES)
    rows = address(scratch.rows16)
    for key in range(0, width, KEY_TILE):
        keys = Matrix(address(scratch.keys16) + (begin + key) * dim * HALF_BYTES, KEYS * dim * HALF_BYTES)
        out = Matrix(address(scores) + key * FLOAT_BYTES, width * FLOAT_BYTES)
        multiply_bf16_tile(TileProduct(Matrix(rows, dim * HALF_BYTES), keys, out), dim // AMX_DEPTH)
    for i in range(count):
        end = position + i + 1 - first - begin
        at = address(scores) + i * width * FLOAT_BYTES
        visible = Range(max(0, end - window), end)
        scratch.factors[i] = np.float32(1.0) / exponents(at, width // KEYS, visible, shape.scale)
        to_bf16(at, width // LANES, address(scratch.rows16) + i * width * HALF_BYTES)
    num_packed = padded_keys(tokens.end - first)
    for panel in range(0, dim // LANES, 2):
        at = address(scratch.values16) + (panel * num_packed + begin) * LANES * HALF_BYTES
        values = Matrix(at, num_packed * LANES * HALF_BYTES)
        sums = Matrix(address(scratch.tile), KEY_TILE * FLOAT_BYTES)
        multiply_bf16_tile(TileProduct(Matrix(rows, width * HALF_BYTES), values, sums), width // AMX_DEPTH)
        for r in range(count):
            at = (row + r) * queries.out_step + head * dim + panel * LANES
            tile = address(scratch.tile) + r * KEY_TILE * FLOAT_BYTES
            scale_row(tile, KEY_TILE // LANES, scratch.factors[r], address(queries.out) + at * FLOAT_BYTES)
