"""Attention over the paged KV cache on CPU: prompts in chunks, generated tokens one by one.

A generated token reads the cache in memory order, block by block, and copies nothing: scores of 16 keys at a time,
softmax, then a weighted sum of values (PagedAttention, Kwon et al. 2023, §4.3, on a CPU); see `attend_decode`. For a
prompt, the keys of one head are packed into panels once and multiplied with tiles of queries; see `chunk.py`.

Keys are read from the cache only. A token's result therefore depends on its sequence alone: not on its batch, not on
how the prompt was chunked, and not on whether the token was decoded or recomputed by a replay.
"""

from typing import Any, NamedTuple

import numpy as np

from engine.kernels.cpu.arguments import (
    Address,
    Attending,
    Batch,
    Cache,
    Element,
    HeadShape,
    Int64s,
    LayerKV,
    Matrix,
    Part,
    Range,
)
from engine.kernels.cpu.chunk import Chunk, attend_chunk
from engine.kernels.cpu.compiler import address, jit
from engine.kernels.cpu.decode_vectors import CacheRows, add_values, score_keys
from engine.kernels.cpu.kv_segments import head_of, prepare_queries
from engine.kernels.cpu.machine import FLOAT_BYTES, KEYS, LANES, MAX_QUERY_ROWS
from engine.kernels.cpu.vectors import exponents, prefetch, scale_row

_int64: Any = np.int64
"""Widens in compiled code: the batch holds int32."""


class _SequenceRows(NamedTuple):
    """Rows of one sequence in the batch: those of its prompt, then generated ones."""

    first: int
    end: int
    num_prompt: int
    position: int  # of the first row


@jit
def attend(attending: Attending, cache: Cache, layer: int, window: int, part: Part) -> None:
    """Compute one thread's part of a layer's attention, for all sequences of the batch."""
    shape, batch = attending.shape, attending.batch
    half_bytes = shape.num_slots * shape.num_kv_heads * shape.row_bytes
    keys = address(cache) + 2 * layer * half_bytes
    kv = LayerKV(keys, keys + half_bytes, cache[0], window)
    num_heads = shape.num_kv_heads
    num_items = _num_generated(batch) * num_heads
    first_item, end_item, item = (
        num_items * part.number // part.num_parts,
        num_items * (part.number + 1) // part.num_parts,
        0,
    )
    for seq in range(len(batch.context_lens)):
        rows = _rows(batch, seq)
        if rows.num_prompt:
            attend_chunk(Chunk(seq, rows.first, rows.num_prompt, rows.position), attending, kv, part)
        for row in range(rows.first + rows.num_prompt, rows.end):
            heads = Range(max(0, first_item - item), min(num_heads, end_item - item))
            if heads.first < heads.end:
                attend_decode(DecodeQuery(seq, row, rows.position + row - rows.first + 1), heads, attending, kv)
            item += num_heads


@jit
def _rows(batch: Batch, seq: int) -> _SequenceRows:
    first, end = _int64(batch.query_starts[seq]), _int64(batch.query_starts[seq + 1])
    position = _int64(batch.context_lens[seq]) - (end - first)
    num_prompt = min(end - first, max(0, _int64(batch.prompt_lens[seq]) - position))
    return _SequenceRows(first, end, num_prompt, position)


@jit
def _num_generated(batch: Batch) -> int:
    total = 0
    for seq in range(len(batch.context_lens)):
        rows = _rows(batch, seq)
        total += rows.end - rows.first - rows.num_prompt
    return total


_PREFETCH_SEGMENTS = 2
"""Segments that are prefetched ahead of use."""


class DecodeQuery(NamedTuple):
    """A generated token and the part of its sequence that it sees."""

    seq: int
    row: int
    num_visible: int  # tokens of the sequence up to and including this one


class _Segments(NamedTuple):
    """The segments of the keys, or of the values, that a query reads."""

    layer: Address
    slots: Int64s  # first slot of each segment
    element: Element


class _NextSegments(NamedTuple):
    """The segments that are read afterwards: the prefetch runs on into them."""

    layer: Address
    slots: Int64s


class _Steps(NamedTuple):
    """Sizes that the loops over segments advance by."""

    group: int  # query heads that share a key/value head
    head_bytes: int  # of a query head
    token_bytes: int  # of a token in the cache


@jit
def attend_decode(decode: DecodeQuery, heads: Range, attending: Attending, kv: LayerKV) -> None:
    """Attend with one query, for the query heads that share the key/value heads in `heads`."""
    queries, shape, batch, scratch = attending
    seq, row_number, end = decode
    start = max(0, end - kv.window)
    first, last = start // KEYS, (end + KEYS - 1) // KEYS
    slots = batch.segments[seq, first:last]
    group, width = shape.num_heads // shape.num_kv_heads, (last - first) * KEYS
    num_rows = (heads.end - heads.first) * group
    at = heads.first * group * shape.head_dim
    query = address(queries.rows) + (row_number * queries.step + at) * FLOAT_BYTES
    prepared = prepare_queries(query, num_rows, shape, scratch, kv.element)
    keys, values = _Segments(kv.keys, slots, kv.element), _Segments(kv.values, slots, kv.element)
    _score_segments(prepared, heads, attending, keys, _NextSegments(kv.values, slots))
    visible = Range(start - first * KEYS, end - first * KEYS)
    for g in range(num_rows):
        row = address(scratch.scores) + g * width * FLOAT_BYTES
        scratch.factors[g] = np.float32(1.0) / exponents(row, width // KEYS, visible, shape.scale * scratch.factors[g])
    out_at = row_number * queries.out_step + at
    queries.out[out_at : out_at + num_rows * shape.head_dim] = np.float32(0.0)
    out = address(queries.out) + out_at * FLOAT_BYTES
    _add_segments(out, heads, attending, values, _NextSegments(kv.keys, _next_slots(seq, batch, kv.window)))
    for g in range(num_rows):
        row = out + g * shape.head_dim * FLOAT_BYTES
        scale_row(row, shape.head_dim // LANES, scratch.factors[g], row)


@jit
def _score_segments(queries: Matrix, heads: Range, attending: Attending, keys: _Segments, after: _NextSegments) -> None:
    """Write scores [query heads, keys] of all segments to scratch.scores, without the queries' factors."""
    shape, slots = attending.shape, keys.slots
    num_heads, (group, _, step) = heads.end - heads.first, _steps(shape)
    row_bytes, scores = len(slots) * KEYS * FLOAT_BYTES, address(attending.scratch.scores)
    for i in range(len(slots)):
        for head in range(num_heads):
            ahead = _segment_ahead(keys, i + _PREFETCH_SEGMENTS, after, step)
            _prefetch_part(ahead, KEYS * step, Part(head, num_heads))
            at = head_of(keys.layer + slots[i] * step, heads.first + head, shape, keys.element)
            rows = CacheRows(at, step, shape.head_dim // LANES)
            for g in range(0, group, MAX_QUERY_ROWS):
                row = head * group + g
                left = Matrix(queries.address + row * queries.step, queries.step)
                out = Matrix(scores + row * row_bytes + i * KEYS * FLOAT_BYTES, row_bytes)
                if group - g >= 3:
                    score_keys(left, rows, out, 3, keys.element)
                elif group - g == 2:
                    score_keys(left, rows, out, 2, keys.element)
                else:
                    score_keys(left, rows, out, 1, keys.element)


@jit
def _add_segments(out: Address, heads: Range, attending: Attending, values: _Segments, after: _NextSegments) -> None:
    """Add the values of all segments to `out`, weighted by the softmax weights in scratch.scores."""
    shape, slots = attending.shape, values.slots
    num_heads, (group, head_bytes, step) = heads.end - heads.first, _steps(shape)
    row_bytes, scores = len(slots) * KEYS * FLOAT_BYTES, address(attending.scratch.scores)
    for i in range(len(slots)):
        for head in range(num_heads):
            ahead = _segment_ahead(values, i + _PREFETCH_SEGMENTS, after, step)
            _prefetch_part(ahead, KEYS * step, Part(head, num_heads))
            at = head_of(values.layer + slots[i] * step, heads.first + head, shape, values.element)
            rows = CacheRows(at, step, shape.head_dim // LANES)
            for g in range(0, group, MAX_QUERY_ROWS):
                row = head * group + g
                weights = Matrix(scores + row * row_bytes + i * KEYS * FLOAT_BYTES, row_bytes)
                target = Matrix(out + row * head_bytes, head_bytes)
                if group - g >= 3:
                    add_values(weights, rows, target, 3, values.element)
                elif group - g == 2:
                    add_values(weights, rows, target, 2, values.element)
                else:
                    add_values(weights, rows, target, 1, values.element)


@jit
def _next_slots(seq: int, batch: Batch, window: int) -> Int64s:
    """First slots of the segments that the next sequence begins with."""
    seq = min(seq + 1, len(batch.context_lens) - 1)
    return batch.segments[seq, max(0, batch.context_lens[seq] - window) // KEYS :]


@jit
def _segment_ahead(segments: _Segments, i: int, after: _NextSegments, step: int) -> Address:
    """The address of segment number `i`, counted on into the segments that are read afterwards."""
    if i < len(segments.slots):
        return segments.layer + segments.slots[i] * step
    return after.layer + after.slots[min(i - len(segments.slots), len(after.slots) - 1)] * step


@jit
def _prefetch_part(at: Address, num_bytes: int, part: Part) -> None:
    """Prefetch one part of these bytes. Few at a time, because current reads wait in the same queue."""
    prefetch(at + num_bytes * part.number // part.num_parts, num_bytes // part.num_parts)


@jit
def _steps(shape: HeadShape) -> _Steps:
    group = shape.num_heads // shape.num_kv_heads
    return _Steps(group, shape.head_dim * FLOAT_BYTES, shape.num_kv_heads * shape.row_bytes)
