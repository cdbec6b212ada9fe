"""Attention of a prompt's chunk with AMX's bf16 tiles, for models in int8. `chunk_head.py` computes it in fp32.

bf16 numbers are kept as their 16 bits. Sums of products and the softmax are fp32.
"""

import numpy as np

from engine.kernels.cpu.amx import multiply_bf16_tile
from engine.kernels.cpu.arguments import Int64s, Matrix, Span
from engine.kernels.cpu.batch import Attending, LayerKV, QueryBlock
from engine.kernels.cpu.constants import AMX_DEPTH, FLOAT_BYTES, HALF_BYTES, KEY_TILE, KEYS, LANES
from engine.kernels.cpu.jit import jit
from engine.kernels.cpu.kv_segments import head_of, read_keys, read_values
from engine.kernels.cpu.tiles import TileProduct
from engine.kernels.cpu.vectors import address, exponents, pair_rows, scale_row, to_bf16


@jit
def pack_head_bf16(segments: Int64s, tokens: Span, kv_head: int, attending: Attending, kv: LayerKV) -> None:
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
def attend_block_bf16(block: QueryBlock, head: int, tokens: Span, window: int, attending: Attending) -> None:
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
        visible = Span(max(0, end - window), end)
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
