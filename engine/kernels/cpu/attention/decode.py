"""Attention of generated tokens on CPU, over the paged KV cache, block by block and without a copy.

A context is cut into splits of SPLIT tokens, at fixed positions (FlashDecoding, Dao et al. 2023, on a CPU). Within a
split: scores of 16 keys at a time, softmax, then a weighted sum of values (PagedAttention, Kwon et al. 2023, §4.3); so
scores stay in the L1 cache, however long the context is. Threads share out splits and heads by the KV that they read.
The splits of a context are joined in their order, after all threads: results do not depend on the number of threads.
"""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.arguments import (
    HIDDEN,
    Address,
    AttentionMemory,
    Element,
    HeadShape,
    LayerKV,
    Matrix,
    Part,
    Range,
)
from engine.kernels.cpu.attention.decode_rounding import prepare_queries, prepare_weights
from engine.kernels.cpu.attention.decode_vectors import (
    MAX_QUERY_ROWS,
    NOTHING,
    Ahead,
    CacheRows,
    KeyRows,
    add_values,
    fetches_of,
    score_keys,
    segments_at_once,
    tokens_per_byte,
)
from engine.kernels.cpu.attention.kv_segments import head_of
from engine.kernels.cpu.attention.scores import adjust_scores, highest_score, powers, sink_weight
from engine.kernels.cpu.attention.shared_rows import attend_shared, sums_of
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, KEYS, LANES, SLOT_BYTES, SPLIT, VECTOR_BYTES
from engine.kernels.cpu.vectors import (
    fill_row,
    mix_rows,
    read_float,
    read_int64,
    scale_row,
    write_float,
)

_HIDDEN, _ONE, _ZERO = np.float32(HIDDEN), np.float32(1.0), np.float32(0.0)
_PREFETCH_SEGMENTS = 4
"""Segments that are prefetched ahead of use."""


class DecodeQuery(NamedTuple):
    """A generated token and the tokens of its sequence that it sees, its own included."""

    seq: int
    row: int
    visible: Range
    result: int  # index of its first split in `Splits`, if it has several


class _Heads(NamedTuple):
    """The key/value heads of a split that a thread attends with, and the factor of `Ahead`."""

    first: int
    end: int
    tokens_per_byte: int


class _Split(NamedTuple):
    """Some key/value heads of one split of a query's context."""

    number: int
    heads: _Heads
    tokens: Range


class _Segments(NamedTuple):
    """The segments of the keys, or of the values, that a query reads."""

    layer: Address
    slots: Address  # of the first slot of each segment
    num_segments: int


@jit
def splits_of(visible: Range) -> Range:
    """Numbers of the splits that hold these tokens."""
    return Range(visible.first // SPLIT, (visible.end + SPLIT - 1) // SPLIT)


@jit
def segments_of(visible: Range) -> Range:
    """Numbers of the segments that hold these tokens."""
    return Range(visible.first // KEYS, (visible.end + KEYS - 1) // KEYS)


@jit
def attend_decode(query: DecodeQuery, own: Range, shape: HeadShape, memory: AttentionMemory, kv: LayerKV) -> None:
    """Attend with one query to the thread's own part of its context.

    Work is counted in segments of one head, split by split. A head of a split is the thread's own if its middle is.
    """
    visible = query.visible
    splits, done, prepared = splits_of(visible), 0, Matrix(0, 0)
    for number in range(splits.first, splits.end):
        tokens = Range(max(visible.first, number * SPLIT), min(visible.end, (number + 1) * SPLIT))
        first, end = segments_of(tokens)
        size = end - first
        first_head = _heads_before(own.first - done, size, shape.num_kv_heads)
        end_head = _heads_before(own.end - done, size, shape.num_kv_heads)
        done += size * shape.num_kv_heads
        if first_head < end_head and shape.num_planes == 1:
            _attend_shared_split(query, number, tokens, shape, memory, kv)
        elif first_head < end_head:
            if prepared.step == 0:
                at = memory.query_rows + query.row * memory.query_bytes
                fill_row(memory.factors, (shape.num_heads + LANES - 1) // LANES, _ONE)
                prepared = prepare_queries(at, shape.num_heads, shape, memory, kv.element)
            heads = _Heads(first_head, end_head, tokens_per_byte((end_head - first_head) * shape.row_bytes))
            _attend_split(query, _Split(number, heads, tokens), prepared, shape, memory, kv)


@jit
def _heads_before(limit: int, size: int, num_heads: int) -> int:
    """Heads of a split, `size` segments each, whose middle lies before `limit`, counted from the split's begin."""
    return min(num_heads, max(0, (2 * limit + size - 1) // (2 * size)))


@jit
def _attend_split(
    query: DecodeQuery, split: _Split, prepared: Matrix, shape: HeadShape, memory: AttentionMemory, kv: LayerKV
) -> None:
    """Attend to a split with some heads. The result goes to the query's row if it has no other split, else to `Splits`,
    not yet divided by the sum of weights. prepared: of all query heads, see `prepare_queries`.
    """
    first, end = segments_of(split.tokens)
    num_vectors, group, dim = end - first, shape.num_heads // shape.num_kv_heads, shape.head_dim
    first_row, num_rows = split.heads.first * group, (split.heads.end - split.heads.first) * group
    own_queries = Matrix(prepared.address + first_row * prepared.step, prepared.step)
    slots = memory.segments + query.seq * memory.segments_bytes + first * SLOT_BYTES
    keys, values = _Segments(kv.keys, slots, num_vectors), _Segments(kv.values, slots, num_vectors)
    _score_segments(own_queries, split.heads, shape, memory, keys, values, kv.element)
    visible = Range(split.tokens.first - first * KEYS, split.tokens.end - first * KEYS)
    splits = splits_of(query.visible)
    is_whole = splits.end - splits.first == 1
    result = (query.result + split.number - splits.first) * shape.num_heads + first_row
    for g in range(num_rows):
        row = memory.scores + g * num_vectors * VECTOR_BYTES
        scale = shape.scale * read_float(memory.factors + (first_row + g) * FLOAT_BYTES)
        distance = first * KEYS - (query.visible.end - 1)
        scale = adjust_scores(row, num_vectors, scale, first_row + g, distance, shape, memory)
        peak = highest_score(row, num_vectors, visible)
        total = powers(row, num_vectors, visible, scale, peak)
        if is_whole:
            total += sink_weight(first_row + g, peak * scale, memory)
            write_float(memory.totals + g * FLOAT_BYTES, total)
        else:
            write_float(memory.split_peaks + (result + g) * FLOAT_BYTES, peak * scale)
            write_float(memory.split_totals + (result + g) * FLOAT_BYTES, total)
    out = memory.split_rows + result * dim * FLOAT_BYTES
    if is_whole:
        out = memory.out + query.row * memory.out_bytes + first_row * dim * FLOAT_BYTES
    fill_row(out, num_rows * dim // LANES, _ZERO)
    after = _following(query, split, memory, kv)
    _add_segments(out, split.heads, shape, memory, values, after, kv.element)
    if is_whole:
        for g in range(num_rows):
            row, total = out + g * dim * FLOAT_BYTES, read_float(memory.totals + g * FLOAT_BYTES)
            scale_row(row, dim // LANES, _ONE / total, row)


@jit
def _attend_shared_split(
    query: DecodeQuery, number: int, tokens: Range, shape: HeadShape, memory: AttentionMemory, kv: LayerKV
) -> None:
    """`_attend_split` with all heads, over rows that they share."""
    slots = memory.segments + query.seq * memory.segments_bytes
    attend_shared(memory.query_rows + query.row * memory.query_bytes, slots, tokens, shape, memory, kv)
    splits, dim = splits_of(query.visible), shape.head_dim
    is_whole = splits.end - splits.first == 1
    first = (query.result + number - splits.first) * shape.num_heads
    for head in range(shape.num_heads):
        row, at = first + head, head * FLOAT_BYTES
        peak, total = read_float(memory.peaks + at), read_float(memory.totals + at)
        out, factor = memory.split_rows + row * dim * FLOAT_BYTES, _ONE
        if is_whole:
            out, factor = memory.out + query.row * memory.out_bytes + head * dim * FLOAT_BYTES, _ONE / total
        else:
            write_float(memory.split_peaks + row * FLOAT_BYTES, peak)
            write_float(memory.split_totals + row * FLOAT_BYTES, total)
        scale_row(sums_of(shape, memory) + head * dim * FLOAT_BYTES, dim // LANES, factor, out)


@jit
def join_splits(query: DecodeQuery, shape: HeadShape, memory: AttentionMemory, part: Part) -> None:
    """Add up the splits of a query, for every part.num_parts-th head. All threads must have attended."""
    splits, num_vectors, num_heads = splits_of(query.visible), shape.head_dim // LANES, shape.num_heads
    end = query.result + splits.end - splits.first
    for head in range(part.number, num_heads, part.num_parts):
        peak, total = _HIDDEN, _ZERO
        for i in range(query.result, end):
            peak = max(peak, read_float(memory.split_peaks + (i * num_heads + head) * FLOAT_BYTES))
        out = memory.out + query.row * memory.out_bytes + head * num_vectors * VECTOR_BYTES
        fill_row(out, num_vectors, _ZERO)
        for i in range(query.result, end):
            row = i * num_heads + head
            factor = np.exp2(read_float(memory.split_peaks + row * FLOAT_BYTES) - peak)
            total += read_float(memory.split_totals + row * FLOAT_BYTES) * factor
            mix_rows(memory.split_rows + row * num_vectors * VECTOR_BYTES, num_vectors, factor, _ONE, out)
        scale_row(out, num_vectors, _ONE / (total + sink_weight(head, peak, memory)), out)


@jit
def _score_segments(
    queries: Matrix,
    heads: _Heads,
    shape: HeadShape,
    memory: AttentionMemory,
    keys: _Segments,
    after: _Segments,
    element: Element,
) -> None:
    """Write scores [query heads, keys] of all segments to memory.scores, without the queries' factors."""
    num_heads, group = heads.end - heads.first, shape.num_heads // shape.num_kv_heads
    row_bytes, at_once = keys.num_segments * VECTOR_BYTES, segments_at_once(group, element)
    fetches = fetches_of(num_heads, shape.num_kv_heads, element)
    for i in range(0, keys.num_segments, at_once):
        last = min(i + at_once, keys.num_segments) - 1
        for head in range(num_heads):
            first_rows = _rows_of_head(keys, i, heads, head, shape, after, element)
            last_rows = _rows_of_head(keys, last, heads, head, shape, after, element)
            rows = KeyRows(first_rows, last_rows, (last - i) * VECTOR_BYTES)
            for g in range(0, group, MAX_QUERY_ROWS):
                row = head * group + g
                left = Matrix(queries.address + row * queries.step, queries.step)
                out = Matrix(memory.scores + row * row_bytes + i * VECTOR_BYTES, row_bytes)
                _score(left, rows, out, group - g, NOTHING if g else fetches, element)


# Functions of their own, because inlined into the loops around them their loops spill more registers.
@jit
def _score(queries: Matrix, keys: KeyRows, out: Matrix, num_left: int, fetches: int, element: Element) -> None:
    score_keys(queries, keys, out, num_left, fetches, element)


@jit
def _add(weights: Matrix, values: CacheRows, out: Matrix, num_left: int, fetches: int, element: Element) -> None:
    add_values(weights, values, out, num_left, fetches, element)


@jit
def _add_segments(
    out: Address,
    heads: _Heads,
    shape: HeadShape,
    memory: AttentionMemory,
    values: _Segments,
    after: _Segments,
    element: Element,
) -> None:
    """Add the values of all segments to `out`, weighted by the softmax weights in memory.scores."""
    num_heads, group = heads.end - heads.first, shape.num_heads // shape.num_kv_heads
    row_bytes, scores, head_bytes = values.num_segments * VECTOR_BYTES, memory.scores, shape.head_dim * FLOAT_BYTES
    fetches = fetches_of(num_heads, shape.num_kv_heads, element)
    for i in range(values.num_segments + 1):
        for head in range(num_heads):
            if i < values.num_segments:  # prepared while the segment before is added: no weight waits for another
                rows = _rows_of_head(values, i, heads, head, shape, after, element)
                weights = Matrix(scores + head * group * row_bytes + i * VECTOR_BYTES, row_bytes)
                prepare_weights(weights, group, rows.address, rows.num_vectors, element)
        for head in range(num_heads if i else 0):
            rows = _rows_of_head(values, i - 1, heads, head, shape, after, element)
            for g in range(0, group, MAX_QUERY_ROWS):
                row = head * group + g
                weights = Matrix(scores + row * row_bytes + (i - 1) * VECTOR_BYTES, row_bytes)
                target = Matrix(out + row * head_bytes, head_bytes)
                _add(weights, rows, target, group - g, NOTHING if g else fetches, element)


@jit
def _following(query: DecodeQuery, split: _Split, memory: AttentionMemory, kv: LayerKV) -> _Segments:
    """The keys that are read after a split: those of the next split, or the first ones of the next sequence."""
    seq, first = query.seq, split.tokens.end // KEYS
    if split.tokens.end == query.visible.end:
        seq, first = min(seq + 1, memory.num_seqs - 1), 0
    slots = memory.segments + seq * memory.segments_bytes + first * SLOT_BYTES
    return _Segments(kv.keys, slots, memory.num_segments - first)


@jit
def _rows_of_head(
    segments: _Segments, i: int, heads: _Heads, head: int, shape: HeadShape, after: _Segments, element: Element
) -> CacheRows:
    """The rows of one of the heads in segment number `i`. Meanwhile its part of those of all of them is prefetched in a
    segment that is read soon, byte by byte, because memory is fastest in order.
    """
    token_bytes = shape.num_kv_heads * shape.row_bytes
    at = head_of(_segment(segments, i, token_bytes), heads.first + head, shape, element)
    segment_ahead = _segment_ahead(segments, i + _PREFETCH_SEGMENTS, after, token_bytes)
    first, gap = head * KEYS * shape.row_bytes, token_bytes - (heads.end - heads.first) * shape.row_bytes
    ahead_at = head_of(segment_ahead, heads.first, shape, element) + first
    ahead = Ahead(ahead_at, first, heads.tokens_per_byte, gap)
    return CacheRows(at, token_bytes, shape.head_dim // LANES, ahead)


@jit
def _segment(segments: _Segments, i: int, step: int) -> Address:
    return segments.layer + read_int64(segments.slots + i * SLOT_BYTES) * step


@jit
def _segment_ahead(segments: _Segments, i: int, after: _Segments, step: int) -> Address:
    """The address of segment number `i`, counted on into the segments that are read afterwards."""
    if i < segments.num_segments:
        return _segment(segments, i, step)
    return _segment(after, min(i - segments.num_segments, after.num_segments - 1), step)
