"""Decode attention on CPU: one query row against a sequence's blocks, front to back."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from engine.cpu.jit import OPTIONS, jit
from engine.cpu.vectors import (
    FLOAT_BYTES,
    KEYS,
    add_values,
    address,
    dot_keys,
    exponents,
    prefetch,
    read_rows,
    scale_row,
)

_AHEAD = 2
"""Blocks that are asked for before they are needed."""


@jit
def attend_decode(seq: Any, heads: Any, attending: Any, kv: Any) -> None:
    """The query of sequence `seq`, for the query heads that share key/value heads [heads[0], heads[1])."""
    queries, shape, batch, scratch = attending
    end = np.int64(batch.context_lens[seq])
    start = max(0, end - kv.window)
    first, last = start // KEYS, (end + KEYS - 1) // KEYS
    parts = batch.parts[seq, first:last]
    group, width = shape.num_heads // shape.num_kv_heads, (last - first) * KEYS
    num_rows = (heads[1] - heads[0]) * group
    at = heads[0] * group * shape.head_dim
    query = address(queries.rows) + (seq * queries.step + at) * FLOAT_BYTES
    _score_parts(query, heads, attending, kv.keys, (parts, kv.kind))
    seen = (start - first * KEYS, end - first * KEYS)
    for g in range(num_rows):
        row = address(scratch.scores) + g * width * FLOAT_BYTES
        scratch.factors[g] = np.float32(1.0) / exponents(row, width // KEYS, seen, shape.scale)
    out_at = seq * shape.num_heads * shape.head_dim + at
    queries.out[out_at : out_at + num_rows * shape.head_dim] = np.float32(0.0)
    out = address(queries.out) + out_at * FLOAT_BYTES
    _add_parts(out, heads, attending, kv.values, (parts, kv.kind))
    for g in range(num_rows):
        row = out + g * shape.head_dim * FLOAT_BYTES
        scale_row(row, shape.head_dim // KEYS, scratch.factors[g], row)


@jit
def _score_parts(query: Any, heads: Any, attending: Any, keys: Any, parts: Any) -> None:
    """Scores [query heads, keys] of all parts; `parts`: (their first slots, a number of the cache's dtype)."""
    shape, scratch = attending.shape, attending.scratch
    slots, kind = parts
    group, dim, step = shape.num_heads // shape.num_kv_heads, shape.head_dim, shape.num_kv_heads * shape.row_bytes
    row_bytes, scores = len(slots) * KEYS * FLOAT_BYTES, address(scratch.scores)
    dims = (dim, group, address(scratch.tile))
    for i in range(len(slots)):
        prefetch(keys + slots[min(i + _AHEAD, len(slots) - 1)] * step, KEYS * step)
        for head in range(heads[1] - heads[0]):
            rows = keys + slots[i] * step + (heads[0] + head) * shape.row_bytes
            out = scores + head * group * row_bytes + i * KEYS * FLOAT_BYTES
            _score(query + head * group * dim * FLOAT_BYTES, (rows, step), (out, row_bytes), dims, kind)


@jit
def _add_parts(out: Any, heads: Any, attending: Any, values: Any, parts: Any) -> None:
    """Add all parts' values, weighted by what the scores have become, to `out`."""
    shape, scratch = attending.shape, attending.scratch
    slots, kind = parts
    group, dim, step = shape.num_heads // shape.num_kv_heads, shape.head_dim, shape.num_kv_heads * shape.row_bytes
    row_bytes, weights = len(slots) * KEYS * FLOAT_BYTES, address(scratch.scores)
    dims = (dim, group, address(scratch.tile))
    for i in range(len(slots)):
        prefetch(values + slots[min(i + _AHEAD, len(slots) - 1)] * step, KEYS * step)
        for head in range(heads[1] - heads[0]):
            rows = values + slots[i] * step + (heads[0] + head) * shape.row_bytes
            factors = weights + head * group * row_bytes + i * KEYS * FLOAT_BYTES
            _add((factors, row_bytes), (rows, step), out + head * group * dim * FLOAT_BYTES, dims, kind)


def _score(query: Any, keys: Any, out: Any, dims: Any, kind: Any) -> None:
    """Scores of 16 keys (address, step) for the query heads that share them; `dims`: head_dim, group, scratch."""
    raise NotImplementedError


@overload(_score, jit_options=OPTIONS)
def _overload_score(query: Any, keys: Any, out: Any, dims: Any, kind: Any) -> Any:
    return _score_floats if kind == types.float32 else _score_small


def _score_floats(query: Any, keys: Any, out: Any, dims: Any, kind: Any) -> None:
    for g in range(dims[1]):
        dot_keys(query + g * dims[0] * FLOAT_BYTES, keys[0], keys[1], dims[0] // KEYS, out[0] + g * out[1])


def _score_small(query: Any, keys: Any, out: Any, dims: Any, kind: Any) -> None:
    # Converted once for all query heads that share them.
    dim, group, tile = dims
    read_rows(keys[0], keys[1], dim // KEYS, tile, kind)
    for g in range(group):
        dot_keys(query + g * dim * FLOAT_BYTES, tile, dim * FLOAT_BYTES, dim // KEYS, out[0] + g * out[1])


def _add(weights: Any, values: Any, out: Any, dims: Any, kind: Any) -> None:
    """Add 16 value rows (address, step), weighted, to the outputs of the query heads that share them."""
    raise NotImplementedError


@overload(_add, jit_options=OPTIONS)
def _overload_add(weights: Any, values: Any, out: Any, dims: Any, kind: Any) -> Any:
    return _add_floats if kind == types.float32 else _add_small


def _add_floats(weights: Any, values: Any, out: Any, dims: Any, kind: Any) -> None:
    dim, group, _ = dims
    for g in range(group):
        add_values(weights[0] + g * weights[1], values[0], values[1], dim // KEYS, out + g * dim * FLOAT_BYTES)


def _add_small(weights: Any, values: Any, out: Any, dims: Any, kind: Any) -> None:
    dim, group, tile = dims
    read_rows(values[0], values[1], dim // KEYS, tile, kind)
    for g in range(group):
        row = out + g * dim * FLOAT_BYTES
        add_values(weights[0] + g * weights[1], tile, dim * FLOAT_BYTES, dim // KEYS, row)
