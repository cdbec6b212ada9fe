"""Causal attention of a prompt's chunk on CPU: packed keys, tiles of queries.

A block of keys and values of one head is packed once, so small that it stays in the L2 cache. All queries of the chunk
pass over it, a tile at a time: scores, powers beneath the highest score so far, sums of values. When a query meets a
higher score, what it has summed is scaled down (online softmax, as in FlashAttention, Dao et al. 2022, §3.1). Blocks
begin at fixed positions of the sequence, so that a query's result does not depend on its chunk.

It is computed in fp32, or in bf16 for models whose activations are rounded anyway, on a CPU with AMX or AVX512-BF16.
bf16 numbers are kept as their 16 bits. Sums of products and the softmax are fp32 in both.
"""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.arguments import (
    HIDDEN,
    Address,
    AttentionMemory,
    HeadShape,
    LayerKV,
    Matrix,
    Part,
    Range,
    Window,
)
from engine.kernels.cpu.attention.kv_segments import head_of, read_keys, read_values
from engine.kernels.cpu.attention.scores import adjust_scores, highest_score, powers, sink_weight
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.machine import (
    AMX_DEPTH,
    FLOAT_BYTES,
    HALF_BYTES,
    KEY_TILE,
    KEYS,
    LANES,
    QUERY_TILE_ROWS,
    SLOT_BYTES,
    VECTOR_BYTES,
    keys_at_once,
)
from engine.kernels.cpu.products.amx import BF16_QUERY_ROWS, multiply_bf16_tile
from engine.kernels.cpu.products.tiles import TileProduct, multiply_tile
from engine.kernels.cpu.vectors import (
    fill_row,
    mix_rows,
    pair_rows,
    prefetch,
    read_float,
    read_int64,
    scale_row,
    to_bf16,
    write_float,
)

_HIDDEN, _ONE, _ZERO = np.float32(HIDDEN), np.float32(1.0), np.float32(0.0)
_keys_at_once = jit(keys_at_once)


class Chunk(NamedTuple):
    """Prompt tokens of one sequence that are computed in this step."""

    seq: int
    row: int  # of the first token
    num_rows: int
    position: int  # of the first token


class _Tile(NamedTuple):
    """Queries of one head that are multiplied at once."""

    rows: Address
    out: Address
    num_rows: int
    position: int  # of the first query
    state: int  # offset of the first query in memory.peaks and memory.totals
    head: int


@jit
def first_visible(position: int, window: Window) -> int:
    """Position of the first token that the query at `position` sees."""
    return max(0, position // window.step * window.step + 1 - window.size)


@jit
def attend_chunk(chunk: Chunk, shape: HeadShape, memory: AttentionMemory, kv: LayerKV, part: Part) -> None:
    """Compute one thread's part of a chunk: every part.num_parts-th tile of queries of a head."""
    group, block = shape.num_heads // shape.num_kv_heads, _keys_at_once(shape.head_dim)
    num_tiles = (chunk.num_rows + _tile_rows(memory) - 1) // _tile_rows(memory)
    num_items = group * num_tiles
    first, end = first_visible(chunk.position, kv.window) // block * block, chunk.position + chunk.num_rows
    for kv_head in range(shape.num_kv_heads):
        first_item = (part.number - kv_head * num_items) % part.num_parts
        if first_item >= num_items:
            continue
        first_tile = kv_head * num_items
        for item in range(first_item, num_items, part.num_parts):
            _begin_tile(_tile(first_tile + item, num_tiles, chunk, shape, memory), shape, memory)
        for position in range(first, end, block):
            keys = Range(position, min(end, position + block))
            _pack(memory.segments + chunk.seq * memory.segments_bytes, keys, kv_head, shape, memory, kv)
            tile = _tile(first_tile + first_item, num_tiles, chunk, shape, memory)
            for item in range(first_item, num_items, part.num_parts):
                following = min(item + part.num_parts, num_items - 1)
                next_tile = _tile(first_tile + following, num_tiles, chunk, shape, memory)
                _prefetch(next_tile, shape, memory)
                _add_keys(tile, keys, kv.window, shape, memory)
                tile = next_tile
        for item in range(first_item, num_items, part.num_parts):
            _finish_tile(_tile(first_tile + item, num_tiles, chunk, shape, memory), shape, memory)


@jit
def _tile_rows(memory: AttentionMemory) -> int:
    return BF16_QUERY_ROWS if memory.in_bf16 else QUERY_TILE_ROWS


@jit
def _tile(number: int, num_tiles: int, chunk: Chunk, shape: HeadShape, memory: AttentionMemory) -> _Tile:
    """Tile `number` of all heads' tiles."""
    head, first = number // num_tiles, number % num_tiles * _tile_rows(memory)
    row, head_at = chunk.row + first, head * shape.head_dim * FLOAT_BYTES
    state = head % (shape.num_heads // shape.num_kv_heads) * chunk.num_rows + first
    return _Tile(
        memory.query_rows + row * memory.query_bytes + head_at,
        memory.out + row * memory.out_bytes + head_at,
        min(_tile_rows(memory), chunk.num_rows - first),
        chunk.position + first,
        state * FLOAT_BYTES,
        head,
    )


@jit
def _prefetch(tile: _Tile, shape: HeadShape, memory: AttentionMemory) -> None:
    """Prefetch queries and sums: those of a long chunk do not fit into the L2 cache beside a block."""
    for i in range(tile.num_rows):
        prefetch(tile.rows + i * memory.query_bytes, shape.head_dim * FLOAT_BYTES)
        prefetch(tile.out + i * memory.out_bytes, shape.head_dim * FLOAT_BYTES)


@jit
def _begin_tile(tile: _Tile, shape: HeadShape, memory: AttentionMemory) -> None:
    for i in range(tile.num_rows):
        fill_row(tile.out + i * memory.out_bytes, shape.head_dim // LANES, _ZERO)
        write_float(memory.peaks + tile.state + i * FLOAT_BYTES, _HIDDEN)
        write_float(memory.totals + tile.state + i * FLOAT_BYTES, _ZERO)


@jit
def _finish_tile(tile: _Tile, shape: HeadShape, memory: AttentionMemory) -> None:
    """Divide sums of values by the softmax totals."""
    scale = _ONE if shape.softcap > _ZERO or memory.slopes else shape.scale  # as adjust_scores leaves it
    for i in range(tile.num_rows):
        at, state = tile.out + i * memory.out_bytes, tile.state + i * FLOAT_BYTES
        peak = read_float(memory.peaks + state) * scale
        total = read_float(memory.totals + state) + sink_weight(tile.head, peak, memory)
        scale_row(at, shape.head_dim // LANES, _ONE / total, at)


@jit
def _padded_keys(num_keys: int) -> int:
    """num_keys rounded up to whole key tiles."""
    return (num_keys + KEY_TILE - 1) // KEY_TILE * KEY_TILE


@jit
def _add_keys(tile: _Tile, keys: Range, window: Window, shape: HeadShape, memory: AttentionMemory) -> None:
    """Let the queries of a tile attend to a block of keys, which is packed."""
    begin = (max(keys.first, first_visible(tile.position, window)) - keys.first) // KEY_TILE * KEY_TILE
    # Keys after the tile's last query are hidden from the whole tile.
    end = _padded_keys(min(keys.end, tile.position + tile.num_rows) - keys.first)
    width = end - begin
    if width <= 0:
        return
    _score(tile, Range(begin, end), shape, memory)
    for i in range(tile.num_rows):
        last = tile.position + i + 1 - keys.first - begin
        first = first_visible(tile.position + i, window) - keys.first - begin
        visible = Range(min(width, max(0, first)), min(width, max(0, last)))
        at, num_vectors = memory.scores + i * _score_bytes(shape), width // LANES
        scale = adjust_scores(at, num_vectors, shape.scale, tile.head, 1 - last, shape, memory)
        _weigh(i, tile.state + i * FLOAT_BYTES, num_vectors, visible, scale, shape, memory)
    _add_values(tile, Range(begin, end), shape, memory)


@jit
def _weigh(
    i: int,
    state: int,
    num_vectors: int,
    visible: Range,
    scale: np.float32,
    shape: HeadShape,
    memory: AttentionMemory,
) -> None:
    """Turn the scores of query number `i` into weights, and write the factor of what it has summed so far."""
    at = memory.scores + i * _score_bytes(shape)
    before = read_float(memory.peaks + state)
    peak, factor = max(before, highest_score(at, num_vectors, visible)), _ONE
    if peak != before:
        factor = np.exp2((before - peak) * scale)
        write_float(memory.peaks + state, peak)
    total = powers(at, num_vectors, visible, scale, peak)
    write_float(memory.totals + state, read_float(memory.totals + state) * factor + total)
    write_float(memory.factors + i * FLOAT_BYTES, factor)
    if memory.in_bf16:
        to_bf16(at, num_vectors, memory.rows16 + i * _score_bytes(shape) // 2)


@jit
def _score_bytes(shape: HeadShape) -> int:
    """Bytes of a query's scores. Some are spare: rows that are a power of two apart would share cache sets."""
    return (_keys_at_once(shape.head_dim) + KEY_TILE) * FLOAT_BYTES


@jit
def _score(tile: _Tile, keys: Range, shape: HeadShape, memory: AttentionMemory) -> None:
    """Write the scores [queries, keys] of a tile to memory.scores. keys: numbers in the block."""
    dim, out_bytes = shape.head_dim, _score_bytes(shape)
    if memory.in_bf16:
        for i in range(tile.num_rows):
            to_bf16(tile.rows + i * memory.query_bytes, dim // LANES, memory.rows16 + i * dim * HALF_BYTES)
    for key in range(keys.first, keys.end, KEY_TILE):
        out = Matrix(memory.scores + (key - keys.first) * FLOAT_BYTES, out_bytes)
        if memory.in_bf16:
            panels = Matrix(memory.keys + key * dim * HALF_BYTES, KEYS * dim * HALF_BYTES)
            multiply_bf16_tile(TileProduct(Matrix(memory.rows16, dim * HALF_BYTES), panels, out), dim // AMX_DEPTH)
        else:
            panels = Matrix(memory.keys + key * dim * FLOAT_BYTES, KEYS * dim * FLOAT_BYTES)
            product = TileProduct(Matrix(tile.rows, memory.query_bytes), panels, out)
            multiply_tile(product, dim, QUERY_TILE_ROWS, 2, _ONE)


@jit
def _add_values(tile: _Tile, keys: Range, shape: HeadShape, memory: AttentionMemory) -> None:
    """Scale the sums of a tile's queries by memory.factors, and add the values of keys, weighted by memory.scores."""
    width, step = keys.end - keys.first, _score_bytes(shape)
    num_panels, panel_keys = shape.head_dim // LANES, _keys_at_once(shape.head_dim)
    sums = Matrix(memory.tile, KEY_TILE * FLOAT_BYTES)
    for p in range(0, num_panels, 2):
        first = (p * panel_keys + keys.first) * LANES
        if memory.in_bf16:
            weights = Matrix(memory.rows16, step // 2)
            values = Matrix(memory.values + first * HALF_BYTES, panel_keys * LANES * HALF_BYTES)
            multiply_bf16_tile(TileProduct(weights, values, sums), width // AMX_DEPTH)
        else:
            weights = Matrix(memory.scores, step)
            values = Matrix(memory.values + first * FLOAT_BYTES, panel_keys * VECTOR_BYTES)
            if p + 1 < num_panels:
                multiply_tile(TileProduct(weights, values, sums), width, QUERY_TILE_ROWS, 2, _ONE)
            else:
                multiply_tile(TileProduct(weights, values, sums), width, QUERY_TILE_ROWS, 1, _ONE)
        for i in range(tile.num_rows):
            at, factor = (
                tile.out + i * memory.out_bytes + p * VECTOR_BYTES,
                read_float(memory.factors + i * FLOAT_BYTES),
            )
            mix_rows(sums.address + i * sums.step, min(2, num_panels - p), _ONE, factor, at)


@jit
def _pack(
    segments: Address, tokens: Range, kv_head: int, shape: HeadShape, memory: AttentionMemory, kv: LayerKV
) -> None:
    """Pack one head of a block of tokens, padded to whole key tiles with the last tokens' segment."""
    step = shape.num_kv_heads * shape.row_bytes
    for key in range(0, _padded_keys(tokens.end - tokens.first), KEYS):
        token = min(tokens.first + key, tokens.end - 1)
        slot = read_int64(segments + token // KEYS * SLOT_BYTES)
        head = head_of(slot * step, kv_head, shape, kv.element)
        if memory.in_bf16:
            _pack_in_bf16(head, key, shape, memory, kv)
        else:
            _pack_in_fp32(head, key, shape, memory, kv)


@jit
def _pack_in_fp32(head: int, key: int, shape: HeadShape, memory: AttentionMemory, kv: LayerKV) -> None:
    """Pack a segment, whose keys get the numbers from `key` on. head: its offset in the cache.

    Keys become panels [keys / 16][head_dim][16], values panels [head_dim / 16][keys][16].
    """
    dim, panel_bytes = shape.head_dim, _keys_at_once(shape.head_dim) * VECTOR_BYTES
    read_keys(kv.keys + head, shape, memory.keys + key * dim * FLOAT_BYTES, kv.element)
    read_values(kv.values + head, shape, memory.tile, kv.element)
    for i in range(KEYS):
        for p in range(dim // LANES):
            at = memory.values + p * panel_bytes + (key + i) * VECTOR_BYTES
            scale_row(memory.tile + i * dim * FLOAT_BYTES + p * VECTOR_BYTES, 1, _ONE, at)


@jit
def _pack_in_bf16(head: int, key: int, shape: HeadShape, memory: AttentionMemory, kv: LayerKV) -> None:
    """Pack a segment in bf16: keys as [keys / 16][head_dim / 2][16][2], values as [head_dim / 16][keys / 2][16][2]."""
    dim, panel_bytes, rows = shape.head_dim, _keys_at_once(shape.head_dim) * LANES * HALF_BYTES, memory.rows16
    read_keys(kv.keys + head, shape, memory.tile, kv.element)
    to_bf16(memory.tile, dim, rows)
    panel = memory.keys + key * dim * HALF_BYTES
    for d in range(0, dim, 2):
        row = rows + d * KEYS * HALF_BYTES
        pair_rows(row, row + KEYS * HALF_BYTES, 1, panel + d * KEYS * HALF_BYTES, 0)
    read_values(kv.values + head, shape, memory.tile, kv.element)
    to_bf16(memory.tile, KEYS * dim // LANES, rows)
    for i in range(0, KEYS, 2):
        row = rows + i * dim * HALF_BYTES
        out = memory.values + (key + i) * LANES * HALF_BYTES
        pair_rows(row, row + dim * HALF_BYTES, dim // LANES, out, panel_bytes)
