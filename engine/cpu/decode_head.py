"""Decode attention on CPU: one query row against a sequence's blocks, front to back."""

from typing import Any

import numpy as np

from engine.cpu.group_vectors import MAX_ROWS, add_values, score_keys
from engine.cpu.jit import jit
from engine.cpu.parts import head_of, put_queries
from engine.cpu.vectors import FLOAT_BYTES, KEYS, address, exponents, prefetch, scale_row

_AHEAD = 2
"""Blocks that are asked for before they are needed."""


@jit
def attend_decode(query_at: Any, heads: Any, attending: Any, kv: Any) -> None:
    """One query, for the query heads that share key/value heads [heads[0], heads[1]).

    query_at: the number of its sequence, its row, and how many tokens it may see.
    """
    queries, shape, batch, scratch = attending
    seq, row_number, end = query_at
    start = max(0, end - kv.window)
    first, last = start // KEYS, (end + KEYS - 1) // KEYS
    parts = batch.parts[seq, first:last]
    group, width = shape.num_heads // shape.num_kv_heads, (last - first) * KEYS
    num_rows = (heads[1] - heads[0]) * group
    at = heads[0] * group * shape.head_dim
    query = address(queries.rows) + (row_number * queries.step + at) * FLOAT_BYTES
    given = put_queries(query, num_rows, shape, scratch, kv.kind)
    _score_parts(given, heads, attending, kv.keys, (parts, kv.kind), (kv.values, parts))
    seen = (start - first * KEYS, end - first * KEYS)
    for g in range(num_rows):
        row = address(scratch.scores) + g * width * FLOAT_BYTES
        scratch.factors[g] = np.float32(1.0) / exponents(row, width // KEYS, seen, shape.scale * scratch.factors[g])
    out_at = row_number * shape.num_heads * shape.head_dim + at
    queries.out[out_at : out_at + num_rows * shape.head_dim] = np.float32(0.0)
    out = address(queries.out) + out_at * FLOAT_BYTES
    _add_parts(out, heads, attending, kv.values, (parts, kv.kind), (kv.keys, _next_parts(seq, batch, kv.window)))
    for g in range(num_rows):
        row = out + g * shape.head_dim * FLOAT_BYTES
        scale_row(row, shape.head_dim // KEYS, scratch.factors[g], row)


@jit
def _score_parts(queries: Any, heads: Any, attending: Any, keys: Any, parts: Any, then: Any) -> None:
    """Scores [query heads, keys] of all parts, but for the queries' factors; `parts`: (their first slots, a number of
    the cache's dtype); `then`: what is read afterwards, (address, first slots).
    """
    shape = attending.shape
    slots, kind = parts
    num_heads, (group, _, step) = heads[1] - heads[0], _steps(shape)
    row_bytes, scores = len(slots) * KEYS * FLOAT_BYTES, address(attending.scratch.scores)
    for i in range(len(slots)):
        for head in range(num_heads):
            _fetch(_ahead(keys, slots, i + _AHEAD, then, step), KEYS * step, (head, num_heads))
            at = (head_of(keys + slots[i] * step, heads[0] + head, shape, kind), step, shape.head_dim // 16)
            for g in range(0, group, MAX_ROWS):
                row = head * group + g
                given = (queries[0] + row * queries[1], queries[1])
                out = (scores + row * row_bytes + i * KEYS * FLOAT_BYTES, row_bytes)
                if group - g >= 3:
                    score_keys(given, at, out, 3, kind)
                elif group - g == 2:
                    score_keys(given, at, out, 2, kind)
                else:
                    score_keys(given, at, out, 1, kind)


@jit
def _add_parts(out: Any, heads: Any, attending: Any, values: Any, parts: Any, then: Any) -> None:
    """Add all parts' values, weighted by what the scores have become, to `out`."""
    shape = attending.shape
    slots, kind = parts
    num_heads, (group, head_bytes, step) = heads[1] - heads[0], _steps(shape)
    row_bytes, scores = len(slots) * KEYS * FLOAT_BYTES, address(attending.scratch.scores)
    for i in range(len(slots)):
        for head in range(num_heads):
            _fetch(_ahead(values, slots, i + _AHEAD, then, step), KEYS * step, (head, num_heads))
            at = (head_of(values + slots[i] * step, heads[0] + head, shape, kind), step, shape.head_dim // 16)
            for g in range(0, group, MAX_ROWS):
                row = head * group + g
                weights = (scores + row * row_bytes + i * KEYS * FLOAT_BYTES, row_bytes)
                target = (out + row * head_bytes, head_bytes)
                if group - g >= 3:
                    add_values(weights, at, target, 3, kind)
                elif group - g == 2:
                    add_values(weights, at, target, 2, kind)
                else:
                    add_values(weights, at, target, 1, kind)


@jit
def _next_parts(seq: Any, batch: Any, window: Any) -> Any:
    """First slots of the parts that the next sequence begins with."""
    seq = min(seq + 1, len(batch.context_lens) - 1)
    return batch.parts[seq, max(0, batch.context_lens[seq] - window) // KEYS :]


@jit
def _ahead(at: Any, slots: Any, i: Any, then: Any, step: Any) -> Any:
    """Where part number `i` is, counted on into those that are read afterwards."""
    if i < len(slots):
        return at + slots[i] * step
    return then[0] + then[1][min(i - len(slots), len(then[1]) - 1)] * step


@jit
def _fetch(at: Any, num_bytes: Any, share: Any) -> None:
    """Ask for a share (index, count) of these bytes: few at a time, as what is read now waits in the same queue."""
    prefetch(at + num_bytes * share[0] // share[1], num_bytes // share[1])


@jit
def _steps(shape: Any) -> Any:
    """Query heads that share a key/value head, bytes of a query head, bytes of a token in the cache."""
    group = shape.num_heads // shape.num_kv_heads
    return group, shape.head_dim * FLOAT_BYTES, shape.num_kv_heads * shape.row_bytes
