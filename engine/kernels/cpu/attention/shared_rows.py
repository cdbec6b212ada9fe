"""Attention of a generated token over rows that are keys and values at once, of all heads: those of latent attention.

The rows of a tile of keys are converted to fp32 once. Scores are a product of the tile with the queries of 16 heads in
the columns of a panel, and so is the sum of values a product of weights with the tile; each row is read from memory
once. As in a prompt (chunk.py), sums are scaled down when a head meets a higher score (FlashAttention, Dao et al. 2022,
§3.1). Lanes are heads: none waits for another, and those past the last head compute what nobody reads.

Tiles begin at fixed positions of the sequence. Scores are scaled only: models with such rows have no soft cap, no ALiBi
and no sinks.
"""

from typing import NamedTuple

import numpy as np
from numba import types

from engine.kernels.cpu.arguments import HIDDEN, Address, AttentionMemory, HeadShape, LayerKV, Matrix, Range
from engine.kernels.cpu.attention.kv_segments import head_of, read_values, transpose_rows
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.compilation.emitter import (
    FLOAT,
    FLOATS,
    INT64,
    Builder,
    CodeContext,
    Emitter,
    Intrinsic,
    NumbaType,
    Signature,
    TypingContext,
    Value,
    Values,
    constant,
    emitted,
)
from engine.kernels.cpu.machine import (
    FLOAT_BYTES,
    KEY_TILE,
    KEYS,
    LANES,
    SLOT_BYTES,
    SUM_HEADS,
    VECTOR_BYTES,
    knows_avx512,
)
from engine.kernels.cpu.products.tiles import TileProduct, multiply_tile
from engine.kernels.cpu.vectors import fill_row, prefetch, read_int64, scale_row

_HIDDEN, _ONE, _ZERO = np.float32(HIDDEN), np.float32(1.0), np.float32(0.0)
_INTP = types.intp
_KEYS_AT_ONCE = 8
"""Keys of a product of scores: LLVM has registers for so many sums, see tiles.py."""


class _Tile(NamedTuple):
    """Scores, then weights, of the heads of a query for the keys of a tile: [keys, heads]."""

    weights: Matrix
    rows: Matrix  # fp32, of the first visible key
    num_keys: int


@jit
def attend_shared(
    query: Address, slots: Address, tokens: Range, shape: HeadShape, memory: AttentionMemory, kv: LayerKV
) -> None:
    """Let all heads of a query, fp32 [num_heads, head_dim], attend to tokens of its context. `slots`: of the first slot
    of the context's segments.

    The sums of rows are left at `sums_of`, fp32 [heads, head_dim], the highest scores, which are powers of two, in
    memory.peaks, and the sums of weights in memory.totals.
    """
    num_panels, dim = _num_panels(shape), shape.head_dim
    for panel in range(num_panels):
        at = panel * LANES * dim * FLOAT_BYTES
        transpose_rows(query + at, dim * FLOAT_BYTES, dim // LANES, memory.prepared + at, _ONE)
    scale_row(memory.prepared, num_panels * dim, shape.scale, memory.prepared)
    fill_row(sums_of(shape, memory), num_panels * dim, _ZERO)
    fill_row(memory.peaks, num_panels, _HIDDEN)
    fill_row(memory.totals, num_panels, _ZERO)
    step = num_panels * VECTOR_BYTES
    for first in range(tokens.first // KEY_TILE * KEY_TILE, tokens.end, KEY_TILE):
        keys = Range(max(0, tokens.first - first), min(KEY_TILE, tokens.end - first))
        _score(slots + first // KEYS * SLOT_BYTES, keys, shape, memory, kv)
        weights = Matrix(memory.scores + keys.first * step, step)
        rows = Matrix(memory.tile + keys.first * dim * FLOAT_BYTES, dim * FLOAT_BYTES)
        tile = _Tile(weights, rows, keys.end - keys.first)
        for panel in range(num_panels):
            at = panel * VECTOR_BYTES
            weights = Matrix(tile.weights.address + at, step)
            weigh_heads(weights, tile.num_keys, memory.peaks + at, memory.totals + at, memory.factors + at)
        following = min(first + KEY_TILE, (tokens.end - 1) // KEYS * KEYS)
        ahead = kv.values + read_int64(slots + following // KEYS * SLOT_BYTES) * shape.row_bytes
        _add_rows(tile, ahead, shape, memory)


@jit
def sums_of(shape: HeadShape, memory: AttentionMemory) -> Address:
    """The sums that `attend_shared` leaves; they lie behind the queries."""
    return memory.prepared + _num_panels(shape) * LANES * shape.head_dim * FLOAT_BYTES


@jit
def _num_panels(shape: HeadShape) -> int:
    return (shape.num_heads + LANES - 1) // LANES


@jit
def _score(slots: Address, keys: Range, shape: HeadShape, memory: AttentionMemory, kv: LayerKV) -> None:
    """Convert the tile's segments with visible keys to fp32 in memory.tile, and write their scores [keys, heads] to
    memory.scores.
    """
    num_panels, dim = _num_panels(shape), shape.head_dim
    step = num_panels * VECTOR_BYTES
    for key in range(keys.first // KEYS * KEYS, keys.end, KEYS):
        segment = kv.values + read_int64(slots + key // KEYS * SLOT_BYTES) * shape.row_bytes
        rows = Matrix(memory.tile + key * dim * FLOAT_BYTES, dim * FLOAT_BYTES)
        read_values(head_of(segment, 0, shape, kv.element), shape, rows.address, kv.element)
        for panel in range(num_panels):
            queries = Matrix(memory.prepared + panel * dim * VECTOR_BYTES, 0)
            out = memory.scores + key * step + panel * VECTOR_BYTES
            for row in range(0, KEYS, _KEYS_AT_ONCE):
                some_rows = Matrix(rows.address + row * rows.step, rows.step)
                multiply_tile(
                    TileProduct(some_rows, queries, Matrix(out + row * step, step)), dim, _KEYS_AT_ONCE, 1, _ONE
                )


@jit
def _add_rows(tile: _Tile, ahead: Address, shape: HeadShape, memory: AttentionMemory) -> None:
    """Scale the sums of all heads by memory.factors, and add the tile's rows, weighted. The rows at `ahead`, which are
    read next, are prefetched meanwhile, a few at a time, because other reads wait in the same queue.
    """
    num_vectors, row_bytes = shape.head_dim // LANES, tile.rows.step
    num_sums = (shape.num_heads + SUM_HEADS - 1) // SUM_HEADS
    ahead_bytes = KEY_TILE * shape.row_bytes
    for vector in range(0, num_vectors, 2):
        prefetch(ahead + ahead_bytes * vector // num_vectors, ahead_bytes * 2 // num_vectors)
        rows = Matrix(tile.rows.address + vector * VECTOR_BYTES, row_bytes)
        for number in range(num_sums):
            at = number * SUM_HEADS * FLOAT_BYTES
            weights = Matrix(tile.weights.address + at, tile.weights.step)
            out = Matrix(sums_of(shape, memory) + number * SUM_HEADS * row_bytes + vector * VECTOR_BYTES, row_bytes)
            if vector + 1 < num_vectors:
                add_weighted(weights, memory.factors + at, rows, out, tile.num_keys, 2)
            else:
                add_weighted(weights, memory.factors + at, rows, out, tile.num_keys, 1)


@emitted
def weigh_heads(
    typing: TypingContext,
    scores: NumbaType,
    num_keys: NumbaType,
    peaks: NumbaType,
    totals: NumbaType,
    factors: NumbaType,
) -> Intrinsic:
    """Turn the scores of 16 heads, which are powers of two, into weights beneath the highest of each head so far.

    scores: a Matrix with a row for each key. peaks, totals: addresses of a vector each, the highest scores and the sums
    of weights, which are brought up to date. The factors of what was summed up so far are written to `factors`.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        scores_at, step = emit.matrix(args[0])
        peaks_at, totals_at, factors_at = (emit.pointer(address) for address in args[2:])
        before = emit.load(peaks_at, FLOATS)
        with emit.loop(args[1], [before]) as loop:
            read = emit.load(emit.at(scores_at, builder.mul(step, loop.index)), FLOATS)
            loop.next.append(emit.call("llvm.maxnum.v16f32", FLOATS, loop.carried[0], read))
        peak = loop.next[0]
        with emit.loop(args[1], [constant(FLOATS, 0.0)]) as total:
            at = emit.at(scores_at, builder.mul(step, total.index))
            power = emit.power_of_two(builder.fsub(emit.load(at, FLOATS), peak))
            emit.store(power, at)
            total.next.append(emit.add_in_order(total.carried[0], power))
        factor = emit.power_of_two(builder.fsub(before, peak))
        emit.store(factor, factors_at)
        emit.store(peak, peaks_at)
        emit.store(emit.multiply_add(emit.load(totals_at, FLOATS), factor, total.next[0]), totals_at)
        return context.get_dummy_value()

    return types.void(scores, *[_INTP] * 4), generate


@emitted
def add_weighted(
    typing: TypingContext,
    weights: NumbaType,
    factors: NumbaType,
    rows: NumbaType,
    out: NumbaType,
    num_keys: NumbaType,
    num_vectors: NumbaType,
) -> Intrinsic:
    """out[head] = out[head] * factors[head] + sum over keys of weights[key][head] * rows[key], for SUM_HEADS heads and
    one or two vectors of the rows, which is a compile-time constant.

    weights, rows: Matrix with a row for each key; out: Matrix; factors: an address.
    """
    vectors = range(num_vectors.literal_value)
    at_once = (
        SUM_HEADS if knows_avx512() else SUM_HEADS // (2 * len(vectors))
    )  # heads whose sums fit into the registers

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        (weights_at, weights_step), (rows_at, rows_step), (out_at, out_step) = (emit.matrix(args[i]) for i in (0, 2, 3))
        factors_at = emit.pointer(args[1])
        for first in range(0, SUM_HEADS, at_once):
            heads = range(first, first + at_once)
            of_heads = [emit.at(out_at, builder.mul(out_step, INT64(head))) for head in heads]
            targets = [emit.at(at, vector * VECTOR_BYTES) for at in of_heads for vector in vectors]
            factors = [emit.splat(emit.load(emit.at(factors_at, head * FLOAT_BYTES), FLOAT)) for head in heads]
            scaled = (factors[i // len(vectors)] for i in range(len(targets)))
            sums = [builder.fmul(emit.load(at, FLOATS), factor) for at, factor in zip(targets, scaled, strict=True)]
            with emit.loop(args[4], sums) as loop:
                row = emit.at(rows_at, builder.mul(rows_step, loop.index))
                values = [emit.load(emit.at(row, vector * VECTOR_BYTES), FLOATS) for vector in vectors]
                of_key = emit.at(weights_at, builder.mul(weights_step, loop.index))
                for i, head in enumerate(heads):
                    weight = emit.splat(emit.load(emit.at(of_key, head * FLOAT_BYTES), FLOAT))
                    for vector, value in zip(vectors, values, strict=True):
                        loop.next.append(emit.multiply_add(weight, value, loop.carried[i * len(vectors) + vector]))
            for total, target in zip(loop.next, targets, strict=True):
                emit.store(total, target)
        return context.get_dummy_value()

    return types.void(weights, _INTP, rows, out, _INTP, num_vectors), generate
