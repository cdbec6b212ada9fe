"""Vector loops of decode attention over KV in int8: `decode_vectors.py` calls them, and has those of other types.

Keys and values are multiplied as they lie (see `kv_segments.py`), with queries and softmax weights of 16 bits (see
`decode_rounding.py`), whose sums are exact.
"""

from typing import NamedTuple

from engine.kernels.cpu.compilation.emitter import (
    FLOAT,
    FLOATS,
    INT32,
    INT64,
    INTS,
    Emitter,
    Value,
    constant,
)
from engine.kernels.cpu.machine import (
    FACTOR_AT,
    KEYS,
    LANES,
    QUAD,
    SIGN_BITS,
    VECTOR_BYTES,
    knows_avx512,
    knows_vnni,
)

AT_ONCE = 2 if knows_avx512() else 1
"""Segments whose scores, and vectors of sums, fit into the registers for MAX_QUERY_ROWS rows. Two share the reads of
queries, or of weights.
"""


class ByteHead(NamedTuple):
    """One head of a segment, while code is written, and as many bytes `ahead` that are prefetched meanwhile, if any."""

    at: Value
    scales_at: Value
    num_vectors: Value
    ahead: Value | None

    def prefetch(self, emit: Emitter, number: Value, lines: int = 1) -> None:
        """Prefetch the lines that lie as far ahead as vector `number` and those behind it."""
        if self.ahead is not None:
            at = emit.vector_at(self.ahead, number)
            for i in range(lines):
                emit.prefetch(emit.at(at, i * VECTOR_BYTES), to_l2=True)

    def prefetch_scales(self, emit: Emitter) -> None:
        """Prefetch the line ahead that belongs to the scales, which lie behind all vectors."""
        self.prefetch(emit, emit.builder.mul(self.num_vectors, INT64(QUAD)))


def score_bytes(emit: Emitter, queries: list[Value], segments: list[ByteHead], out: list[list[Value]]) -> None:
    """out[segment][row][0:16] = dot products of each prepared query with the 16 keys of a segment."""
    sums = (_scores_of_limbs if knows_vnni() else _scores_of_shorts)(emit, queries, segments)
    for segment, totals, rows in zip(segments, sums, out, strict=True):
        segment.prefetch_scales(emit)
        scales = emit.load(segment.scales_at, FLOATS)
        for total, row in zip(totals, rows, strict=True):
            emit.store(emit.builder.fmul(total, scales), row)


def _scores_of_limbs(emit: Emitter, queries: list[Value], segments: list[ByteHead]) -> list[list[Value]]:
    builder, num_vectors = emit.builder, segments[0].num_vectors
    dim = builder.mul(num_vectors, INT64(LANES))
    limbs = [emit.at(query, builder.mul(dim, INT64(i))) for query in queries for i in range(2)]
    tails = [emit.at(query, builder.mul(dim, INT64(2))) for query in queries]
    initial = [emit.splat(emit.load(emit.at(tail, 4 * i), INT32)) for tail in tails for i in range(2)]
    flip = constant(INTS, SIGN_BITS * 0x01010101)
    with emit.loop(builder.mul(num_vectors, INT64(QUAD)), initial * len(segments)) as loop:
        keys = [builder.xor(_read_keys(emit, segment, loop.index), flip) for segment in segments]
        places = [emit.at(limb, builder.mul(loop.index, INT64(QUAD))) for limb in limbs]
        fours = [emit.splat(emit.load(at, INT32, 1)) for at in places]
        pairs = [(unsigned, four) for unsigned in keys for four in fours]
        loop.next += [emit.dot_bytes(total, *pair) for total, pair in zip(loop.carried, pairs, strict=True)]
    return [_joined(emit, loop.next[i : i + len(limbs)]) for i in range(0, len(loop.next), len(limbs))]


def _scores_of_shorts(emit: Emitter, queries: list[Value], segments: list[ByteHead]) -> list[list[Value]]:
    builder, num_rows = emit.builder, len(queries)
    zeros = [constant(INTS, 0)] * (num_rows * len(segments))
    with emit.loop(builder.mul(segments[0].num_vectors, INT64(QUAD)), zeros) as loop:
        offset = builder.mul(loop.index, INT64(2 * QUAD))
        fours = [emit.at(query, offset) for query in queries]
        for i, segment in enumerate(segments):
            keys = _read_keys(emit, segment, loop.index)
            loop.next += _dot_shorts(emit, loop.carried[i * num_rows : (i + 1) * num_rows], fours, keys)
    floats = [builder.sitofp(total, FLOATS) for total in loop.next]
    return [floats[i : i + num_rows] for i in range(0, len(floats), num_rows)]


def add_bytes(emit: Emitter, weights: list[Value], values: ByteHead, out: list[Value]) -> None:
    """out[row] += sum over 16 tokens of weights[row][token] * value row. The weights are rounded ones."""
    builder, num_vectors = emit.builder, values.num_vectors
    factors = [emit.splat(emit.load(emit.at(at, FACTOR_AT), FLOAT)) for at in weights]
    values.prefetch_scales(emit)
    parts = [(INT64(0), num_vectors, 1)]
    if AT_ONCE > 1:
        num_pairs = builder.lshr(num_vectors, INT64(1))
        done = builder.shl(num_pairs, INT64(1))
        parts = [(INT64(0), num_pairs, 2), (done, builder.sub(num_vectors, done), 1)]
    for first, count, size in parts:
        with builder.if_then(builder.icmp_signed(">", count, INT64(0))), emit.loop(count, []) as loop:
            index = builder.add(first, builder.mul(loop.index, INT64(size)))
            indices = [builder.add(index, INT64(i)) for i in range(size)]
            _add_vectors(emit, weights, values, indices, list(zip(out, factors, strict=True)))


def _add_vectors(
    emit: Emitter, weights: list[Value], values: ByteHead, indices: list[Value], out: list[tuple[Value, Value]]
) -> None:
    """`add_bytes` for the vectors with these indices. out: of each row, a pointer and the factor of its sums."""
    builder = emit.builder
    values.prefetch(emit, builder.mul(indices[0], INT64(KEYS // QUAD)), len(indices) * KEYS // QUAD)
    groups: list[list[Value]] = []
    for i in range(KEYS // QUAD):
        before = builder.mul(values.num_vectors, INT64(i))
        numbers = [builder.add(before, index) for index in indices]
        groups.append([emit.load(emit.vector_at(values.at, number), INTS) for number in numbers])
    sums = (_sums_of_limbs if knows_vnni() else _sums_of_shorts)(emit, weights, groups)
    for i, index in enumerate(indices):
        for total, (out_at, factor) in zip(sums[i], out, strict=True):
            target = emit.vector_at(out_at, index)
            emit.store(emit.multiply_add(total, factor, emit.load(target, FLOATS)), target)


def _read_keys(emit: Emitter, segment: ByteHead, index: Value) -> Value:
    segment.prefetch(emit, index)
    return emit.load(emit.vector_at(segment.at, index), INTS)


def _sums_of_limbs(emit: Emitter, weights: list[Value], groups: list[list[Value]]) -> list[list[Value]]:
    """For each vector of a group, the sums of each row. groups: four tokens each."""
    limbs = [emit.at(at, LANES * i) for at in weights for i in range(2)]
    totals = [[constant(INTS, 0)] * len(limbs) for _ in groups[0]]
    for number, group in enumerate(groups):
        for i, limb in enumerate(limbs):
            four = emit.splat(emit.load(emit.at(limb, QUAD * number), INT32, 1))
            for of_vector, four_rows in zip(totals, group, strict=True):
                of_vector[i] = emit.dot_bytes(of_vector[i], four, four_rows)
    return [_joined(emit, of_vector) for of_vector in totals]


def _sums_of_shorts(emit: Emitter, weights: list[Value], groups: list[list[Value]]) -> list[list[Value]]:
    totals = [[constant(INTS, 0)] * len(weights) for _ in groups[0]]
    for number, group in enumerate(groups):
        fours = [emit.at(at, 2 * QUAD * number) for at in weights]
        totals = [_dot_shorts(emit, *each) for each in zip(totals, [fours] * len(group), group, strict=True)]
    return [[emit.builder.sitofp(total, FLOATS) for total in of_vector] for of_vector in totals]


def _joined(emit: Emitter, limbs: list[Value]) -> list[Value]:
    """256 * high + low as fp32, for int32 vectors high, low, high, low, ..."""
    floats = [emit.builder.sitofp(total, FLOATS) for total in limbs]
    factor = constant(FLOATS, 256.0)
    return [emit.multiply_add(high, factor, low) for high, low in zip(floats[::2], floats[1::2], strict=True)]


def _dot_shorts(emit: Emitter, totals: list[Value], fours: list[Value], lanes: Value) -> list[Value]:
    """Add the products of each lane's four signed bytes with the four int16 (in SHORTS_ORDER) at each pointer."""
    for i, pairs in enumerate((emit.even_bytes(lanes), emit.odd_bytes(lanes))):
        twos = [emit.splat(emit.load(emit.at(four, 4 * i), INT32, 1)) for four in fours]
        totals = [emit.dot_pairs(total, two, pairs) for total, two in zip(totals, twos, strict=True)]
    return totals
