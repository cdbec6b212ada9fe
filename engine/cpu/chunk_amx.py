"""Attention of a prompt's chunk with AMX's bf16 tiles, for models whose arithmetic is int8 anyway; fp32:
`chunk_head.py`.

bf16 numbers are kept as their 16 bits. Products are summed in fp32, and the softmax is fp32.
"""

from typing import Any

import numpy as np

from engine.cpu.amx import multiply_bf16_tile
from engine.cpu.jit import jit
from engine.cpu.parts import head_of, read_keys, read_values
from engine.cpu.vectors import (
    FLOAT_BYTES,
    HALF_BYTES,
    KEYS,
    address,
    exponents,
    pair_rows,
    scale_row,
    to_bf16,
)

QUERY_BLOCK = 32
"""Queries that share one pass over the keys: two tiles."""
KEY_TILE = 2 * KEYS
DEPTH = 32
"""Numbers of a row that one tile holds."""


@jit
def pack_head(parts: Any, span: Any, kv_head: Any, attending: Any, kv: Any) -> None:
    """Keys of one head as panels [keys / 16][head_dim / 2][16][2], values as panels [head_dim / 16][keys / 2][16][2],
    of tokens [span[0], span[1]) and what fills the last tile up.
    """
    first, end = span
    shape, scratch = attending.shape, attending.scratch
    dim, step = shape.head_dim, shape.num_kv_heads * shape.row_bytes
    num_keys = padded(end - first)
    tile, spare, rows = scratch.tile, scratch.tile[KEYS * dim :], address(scratch.rows16)
    for token in range(first, first + num_keys, KEYS):
        place = head_of(parts[min(token, end - 1) // KEYS] * step, kv_head, shape, kv.kind)
        read_keys(kv.keys + place, shape, tile, spare, kv.kind)
        to_bf16(address(tile), dim, rows)
        panel = address(scratch.keys16) + (token - first) * dim * HALF_BYTES
        for d in range(0, dim, 2):
            row = rows + d * KEYS * HALF_BYTES
            pair_rows(row, row + KEYS * HALF_BYTES, 1, panel + d * KEYS * HALF_BYTES, 0)
        read_values(kv.values + place, shape, address(tile), kv.kind)
        to_bf16(address(tile), KEYS * dim // 16, rows)
        for key in range(0, KEYS, 2):
            row = rows + key * dim * HALF_BYTES
            out = address(scratch.values16) + (token - first + key) * 16 * HALF_BYTES
            pair_rows(row, row + dim * HALF_BYTES, dim // 16, out, num_keys * 16 * HALF_BYTES)


@jit
def padded(num_keys: Any) -> Any:
    """Keys in whole tiles."""
    return (num_keys + KEY_TILE - 1) // KEY_TILE * KEY_TILE


@jit
def attend_block(block: Any, head: Any, span: Any, window: Any, attending: Any) -> None:
    """One head of up to QUERY_BLOCK queries: `block` is their first row, their count and the first one's position,
    `span` the tokens whose keys are packed.
    """
    row, count, position = block
    queries, shape, _, scratch = attending
    first, dim, scores = span[0], shape.head_dim, scratch.scores
    begin = max(0, position + 1 - window - first) // KEY_TILE * KEY_TILE
    width = padded(position + count - first) - begin
    for i in range(count):
        at = address(queries.rows) + ((row + i) * queries.step + head * dim) * FLOAT_BYTES
        to_bf16(at, dim // 16, address(scratch.rows16) + i * dim * HALF_BYTES)
    rows = address(scratch.rows16)
    for key in range(0, width, KEY_TILE):
        keys = (address(scratch.keys16) + (begin + key) * dim * HALF_BYTES, KEYS * dim * HALF_BYTES)
        out = (address(scores) + key * FLOAT_BYTES, width * FLOAT_BYTES)
        multiply_bf16_tile(((rows, dim * HALF_BYTES), keys, out), dim // DEPTH)
    for i in range(count):
        end = position + i + 1 - first - begin
        at = address(scores) + i * width * FLOAT_BYTES
        scratch.factors[i] = np.float32(1.0) / exponents(at, width // KEYS, (max(0, end - window), end), shape.scale)
        to_bf16(at, width // 16, address(scratch.rows16) + i * width * HALF_BYTES)
    num_packed = padded(span[1] - first)
    for p in range(0, dim // 16, 2):
        at = address(scratch.values16) + (p * num_packed + begin) * 16 * HALF_BYTES
        values, sums = (at, num_packed * 16 * HALF_BYTES), (address(scratch.tile), KEY_TILE * FLOAT_BYTES)
        multiply_bf16_tile(((rows, width * HALF_BYTES), values, sums), width // DEPTH)
        for r in range(count):
            at = ((row + r) * shape.num_heads + head) * dim + p * 16
            tile = address(scratch.tile) + r * KEY_TILE * FLOAT_BYTES
            scale_row(tile, KEY_TILE // 16, scratch.factors[r], address(queries.out) + at * FLOAT_BYTES)
