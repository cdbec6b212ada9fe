"""Attention over the paged KV cache on CPU: prompts in chunks (chunk.py), generated tokens one by one (decode.py).

Keys are read from the cache only. A token's result therefore depends on its sequence alone: not on its batch, not on
how the prompt was chunked, and not on whether the token was decoded or recomputed by a replay.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from engine.kernels.cpu.arguments import (
    Address,
    Attending,
    AttentionMemory,
    Batch,
    Cache,
    CacheCode,
    HeadShape,
    LayerKV,
    LayerPlace,
    Part,
    Range,
    Window,
)
from engine.kernels.cpu.attention.cache_rows import write_token
from engine.kernels.cpu.attention.chunk import Chunk, attend_chunk, first_visible
from engine.kernels.cpu.attention.decode import DecodeQuery, attend_decode, join_splits, segments_of, splits_of
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.compilation.pieces import Piece, caller, element_of
from engine.kernels.cpu.machine import FLOAT_BYTES, SLOT_BYTES
from engine.kernels.cpu.threads.barrier import share_of
from engine.kernels.cpu.vectors import address

_int64: Any = np.int64
"""Widens in compiled code: the batch holds int32."""


class _SequenceRows(NamedTuple):
    """Rows of one sequence in the batch: those of its prompt, then generated ones."""

    first: int
    end: int
    num_prompt: int
    position: int  # of the first row


@Piece
def attend_prompt(
    kind: Any,
    chunk: Chunk,
    shape: HeadShape,
    memory: AttentionMemory,
    keys: Address,
    values: Address,
    window: Window,
    part: Part,
) -> None:
    """`attend_chunk`. kind: of KV."""
    attend_chunk(chunk, shape, memory, LayerKV(keys, values, element_of(kind), window), part)


@Piece
def attend_token(
    kind: Any,
    query: DecodeQuery,
    own: Range,
    shape: HeadShape,
    memory: AttentionMemory,
    keys: Address,
    values: Address,
    window: Window,
) -> None:
    """`attend_decode`. kind: of KV."""
    attend_decode(query, own, shape, memory, LayerKV(keys, values, element_of(kind), window))


call_attend_prompt, call_attend_token = caller(attend_prompt), caller(attend_token)


def cache_code(kind: DTypeLike) -> CacheCode:
    """The code for KV of this type, which is compiled or read from disk."""
    return CacheCode(*(piece.address_for(kind) for piece in (attend_prompt, attend_token, write_token)))


@jit
def attend(attending: Attending, cache: Cache, place: LayerPlace, window: Window, part: Part) -> None:
    """Compute one thread's part of a layer's attention, for all sequences of the batch.

    If `has_splits`, all threads then call `join`.
    """
    shape, batch, memory = attending.shape, attending.batch, memory_of(attending, place)
    plane_bytes = shape.num_slots * shape.num_kv_heads * shape.row_bytes
    keys = address(cache) + shape.num_planes * place.number * plane_bytes
    values = keys + (shape.num_planes - 1) * plane_bytes
    work = _decode_work(batch, window) * shape.num_kv_heads
    (first, end), done, result = share_of(work, part.number, part.num_parts), 0, 0
    for seq in range(len(batch.context_lens)):
        rows = _rows(batch, seq)
        if rows.num_prompt:
            chunk = Chunk(seq, rows.first, rows.num_prompt, rows.position)
            call_attend_prompt(attending.code.attend_prompt, (chunk, shape, memory, keys, values, window, part))
        for row in range(rows.first + rows.num_prompt, rows.end):
            query = _query(seq, row, rows, window, result)
            size = _size(segments_of(query.visible)) * shape.num_kv_heads
            if done < end and done + size > first:
                own = Range(first - done, end - done)
                call_attend_token(attending.code.attend_token, (query, own, shape, memory, keys, values, window))
            done += size
            result += _num_results(query)


@jit
def has_splits(batch: Batch, window: Window) -> bool:
    """True if a generated token's context has several splits."""
    for seq in range(len(batch.context_lens)):
        rows = _rows(batch, seq)
        for row in range(rows.first + rows.num_prompt, rows.end):
            if _num_results(_query(seq, row, rows, window, 0)) > 0:
                return True
    return False


@jit
def join(attending: Attending, place: LayerPlace, window: Window, part: Part) -> None:
    """Compute one thread's part of what follows `attend`: join the splits of contexts that have several."""
    batch, memory, result = attending.batch, memory_of(attending, place), 0
    for seq in range(len(batch.context_lens)):
        rows = _rows(batch, seq)
        for row in range(rows.first + rows.num_prompt, rows.end):
            query = _query(seq, row, rows, window, result)
            if _num_results(query) > 0:
                join_splits(query, attending.shape, memory, part)
            result += _num_results(query)


@jit
def memory_of(attending: Attending, place: LayerPlace) -> AttentionMemory:
    """The addresses of all arrays."""
    sinks = attending.sinks
    queries, batch, scratch, splits = attending.queries, attending.batch, attending.scratch, attending.splits
    num_segments = batch.segments.shape[1] // batch.slots.shape[1]
    in_bf16 = len(scratch.keys16) > 0
    return AttentionMemory(  # in order: numba takes no more than 15 names
        address(queries.rows),
        queries.step * FLOAT_BYTES,
        address(queries.out),
        queries.out_step * FLOAT_BYTES,
        address(batch.segments) + place.group * num_segments * SLOT_BYTES,
        num_segments,
        batch.segments.shape[1] * SLOT_BYTES,
        batch.segments.shape[0],
        address(scratch.scores),
        address(scratch.keys16) if in_bf16 else address(scratch.keys),
        address(scratch.values16) if in_bf16 else address(scratch.values),
        address(scratch.rows16),
        address(scratch.tile),
        address(scratch.factors),
        address(scratch.peaks),
        address(scratch.totals),
        address(scratch.prepared),
        address(splits.rows),
        address(splits.peaks),
        address(splits.totals),
        in_bf16,
        address(attending.slopes) if len(attending.slopes) else 0,
        address(sinks) + place.layer * sinks.shape[1] * FLOAT_BYTES if len(sinks) else 0,
    )


@jit
def _rows(batch: Batch, seq: int) -> _SequenceRows:
    first, end = _int64(batch.query_starts[seq]), _int64(batch.query_starts[seq + 1])
    position = _int64(batch.context_lens[seq]) - (end - first)
    num_prompt = min(end - first, max(0, _int64(batch.prompt_lens[seq]) - position))
    return _SequenceRows(first, end, num_prompt, position)


@jit
def _query(seq: int, row: int, rows: _SequenceRows, window: Window, result: int) -> DecodeQuery:
    end = rows.position + row - rows.first + 1
    return DecodeQuery(seq, row, Range(first_visible(end - 1, window), end), result)


@jit
def _size(numbers: Range) -> int:
    return numbers.end - numbers.first


@jit
def _num_results(query: DecodeQuery) -> int:
    """Entries of `Splits` that the query needs."""
    num_splits = _size(splits_of(query.visible))
    return num_splits if num_splits > 1 else 0


@jit
def _decode_work(batch: Batch, window: Window) -> int:
    """Segments that the generated tokens of the batch read."""
    total = 0
    for seq in range(len(batch.context_lens)):
        rows = _rows(batch, seq)
        for row in range(rows.first + rows.num_prompt, rows.end):
            total += _size(segments_of(_query(seq, row, rows, window, 0).visible))
    return total
