"""Random tokens from rows of logits, by temperature, top-k, top-p, min-p and typical-p.

The order is that of transformers, see engine/sampling/truncation.py. Nothing is sorted, which would take milliseconds
for 150,000 tokens: the lowest value that a limit keeps is sought in 256 ranges of values, then in 256 parts of the
range that it is in, and so on. Few values are looked at more than once: most of the probability is near the top.
"""

from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from engine.kernels.cpu.arguments import Address, Floats, Int64s, Matrix, Range
from engine.kernels.cpu.buffers import aligned, round_up
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.compilation.emitter import (
    FLOATS,
    INT64,
    INTS,
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
from engine.kernels.cpu.compilation.stored import Addresses, Kernel, Kinds, load
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES, LOG2_E, VECTOR_BYTES
from engine.kernels.cpu.threads.barrier import share_of
from engine.kernels.cpu.vectors import INFINITY_BITS, address, index_of_largest, is_nan, read_float

TEMPERATURE, TOP_K, TOP_P, MIN_P, TYPICAL_P, UNIFORM, NUM_LIMITS = range(7)
"""Columns of `Draws.limits`: off are top_k 0, top_p 1, min_p 0, typical_p 1; UNIFORM is the random number in [0, 1)."""
_HIDDEN = -float(np.finfo(np.float32).max)
"""The value of tokens that are not allowed. Compiled comparisons know neither infinity nor NaN."""
_LOWEST = np.float32(-3e38)
"""Below all values of tokens that are allowed."""
_NUM_PARTS = 256
_REACHES = (np.float32(8.0), np.float32(64.0), np.float32(3.4e38))
"""How far below the highest value the first search goes, and the later ones if that is not far enough."""
_SUM_OF = 256


class Draws(NamedTuple):
    """Rows of fp32 logits, and the tokens to draw from them."""

    logits: Matrix
    num_columns: int
    rows: Int64s  # [draws]: of the logits
    limits: NDArray[np.float64]  # [draws, NUM_LIMITS]
    tokens: Int64s  # [draws], written


class DrawScratch(NamedTuple):
    """Memory of one thread: each as long as a row, in whole vectors."""

    values: Floats  # divided by the temperature
    weights: Floats  # e^(value - the highest)
    keys: Floats
    some_keys: Floats
    some_weights: Floats
    parts: NDArray[np.float64]  # [_NUM_PARTS, 3]: amount, least and largest key


def draw_scratch(num_columns: int) -> DrawScratch:
    values, weights, keys, *some = (aligned(round_up(num_columns, LANES), np.float32) for _ in range(5))
    return DrawScratch(values, weights, keys, some[0], some[1], np.zeros((_NUM_PARTS, 3)))


@Kernel
def draw_rows(kinds: Kinds, addresses: Addresses, _: Range) -> None:
    """Draw a token for each row. Every thread runs this kernel, on Draws, DrawScratch, anything, and Team."""
    draws, scratch, _, team = load(kinds, addresses)
    own = share_of(len(draws.rows), team.thread, team.num_threads)
    for i in range(own.first, own.end):
        row = draws.logits.address + draws.rows[i] * draws.logits.step
        draws.tokens[i] = _draw(row, draws.num_columns, draws.limits[i], scratch)


@jit
def _draw(row: Address, num_columns: int, limits: NDArray[np.float64], scratch: DrawScratch) -> int:
    values, weights = scratch.values, scratch.weights
    temperature, num_vectors = np.float32(limits[TEMPERATURE]), len(values) // LANES
    num_whole = num_columns // LANES
    if num_whole > 0:
        _divide(row, num_whole, temperature, address(values))
    for i in range(num_whole * LANES, num_columns):
        values[i] = read_float(row + i * FLOAT_BYTES)
    if num_columns % LANES:
        last = address(values) + (num_vectors - 1) * VECTOR_BYTES
        _divide(last, 1, temperature, last)
    for i in range(num_columns, len(values)):
        values[i] = _HIDDEN
    best = index_of_largest(address(values), num_vectors)
    highest = values[best]
    if not _LOWEST < highest < -_LOWEST:  # nothing is allowed, or the model has computed infinity
        return min(best, num_columns - 1)
    _exponents(address(values), num_vectors, highest, address(weights))
    low = _lowest_kept(limits, highest, scratch)
    for i in range(len(values)):
        weights[i] = weights[i] if values[i] >= low else np.float32(0.0)
    if limits[TYPICAL_P] < 1.0:
        _keep_typical(limits[TYPICAL_P], highest, scratch)
    return _token_at(limits[UNIFORM], weights)


@jit
def _lowest_kept(limits: NDArray[np.float64], highest: np.float32, scratch: DrawScratch) -> np.float32:
    """The lowest value that top-k, top-p and min-p keep."""
    values, weights, low = scratch.values, scratch.weights, _LOWEST
    if limits[TOP_K] > 0.0:
        low = _reaching(limits[TOP_K], False, low, highest, values, scratch)
    if limits[TOP_P] < 1.0:
        total = 0.0
        for i in range(len(values)):
            total += np.float64(weights[i]) if values[i] >= low else 0.0
        low = _reaching(limits[TOP_P] * total, True, low, highest, values, scratch)
    if limits[MIN_P] > 0.0:
        low = max(low, highest + np.float32(np.log(limits[MIN_P])))
    return low


@jit
def _keep_typical(typical_p: float, highest: np.float32, scratch: DrawScratch) -> None:
    """Keep the tokens whose information is closest to the entropy, until they have this share of the probability: the
    weights of others become 0 (locally typical sampling, Meister et al. 2023).
    """
    values, weights, keys = scratch.values, scratch.weights, scratch.keys
    total, of_values = 0.0, 0.0
    for i in range(len(values)):
        total += weights[i]
        of_values += np.float64(weights[i]) * np.float64(max(values[i] - highest, np.float32(-1000.0)))
    mean, nearest = np.float32(of_values / total), np.float32(_HIDDEN)  # entropy is log(total) - mean
    for i in range(len(values)):
        keys[i] = -abs(values[i] - highest - mean) if weights[i] > 0.0 else np.float32(_HIDDEN)
        nearest = max(nearest, keys[i])
    low = _reaching(typical_p * total, True, _LOWEST, nearest, keys, scratch)
    for i in range(len(values)):
        weights[i] = weights[i] if keys[i] >= low else np.float32(0.0)


@jit
def _reaching(
    amount: float, is_mass: bool, lowest: np.float32, highest: np.float32, keys: Floats, scratch: DrawScratch
) -> np.float32:
    """The largest key such that the keys from it to the highest reach this amount: a number of keys, or the sum of
    their weights. Keys below `lowest` do not count; if those from there on do not reach it, the least of them.
    """
    some_keys, some_weights, parts = scratch.some_keys, scratch.some_weights, scratch.parts
    low, high, above, num_some = lowest, highest, 0.0, 0
    for reach in _REACHES:
        low, num_some, found = max(lowest, highest - reach), 0, 0.0
        for i in range(len(keys)):
            if keys[i] >= low:
                some_keys[num_some] = keys[i]
                some_weights[num_some] = scratch.weights[i] if is_mass else np.float32(1.0)
                found += some_weights[num_some]
                num_some += 1
        if found >= amount or low == lowest:
            break
    while low < high:
        for part in range(_NUM_PARTS):
            parts[part, 0], parts[part, 1], parts[part, 2] = 0.0, np.float64(high), np.float64(low)
        scale = _NUM_PARTS / (np.float64(high) - np.float64(low))
        for i in range(num_some):
            key = some_keys[i]
            if low <= key <= high:
                part = min(_NUM_PARTS - 1, int((np.float64(high) - np.float64(key)) * scale))
                parts[part, 0] += some_weights[i]
                parts[part, 1], parts[part, 2] = min(parts[part, 1], key), max(parts[part, 2], key)
        last, is_reached = 0, False
        for part in range(_NUM_PARTS):
            if parts[part, 2] >= parts[part, 1]:  # it has keys
                last, is_reached = part, above + parts[part, 0] >= amount
                if is_reached:
                    break
                above += parts[part, 0]
        low, high = np.float32(parts[last, 1]), np.float32(parts[last, 2])
        if not is_reached:
            return low
    return high


@jit
def _token_at(uniform: float, weights: Floats) -> int:
    """The first token at which the sum of weights exceeds this share of their total; the last one with a weight, if
    rounding leaves none.
    """
    total = 0.0
    for i in range(len(weights)):
        total += weights[i]
    target, before, token = uniform * total, 0.0, 0
    for first in range(0, len(weights), _SUM_OF):
        end, of_block = min(first + _SUM_OF, len(weights)), 0.0
        for i in range(first, end):
            of_block += weights[i]
        if of_block > 0.0 and before + of_block > target:
            for i in range(first, end):
                before += weights[i]
                if weights[i] > 0.0:
                    token = i
                    if before > target:
                        return token
            continue
        before += of_block
    for i in range(len(weights)):
        if weights[i] > 0.0:
            token = i
    return token


_INTP = types.intp


@emitted
def _divide(
    typing: TypingContext, values: NumbaType, num_vectors: NumbaType, divisor: NumbaType, out: NumbaType
) -> Intrinsic:
    """out = values / divisor; _HIDDEN for minus infinity and NaN.

    The quotients are exact. Otherwise LLVM would multiply by a reciprocal, but not in short loops: the end of a row,
    which is divided apart, would have other quotients, and tied tokens would not be tied any more.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        at, divisor, out = emit.pointer(args[0]), emit.splat(args[2]), emit.pointer(args[3])
        hidden = constant(FLOATS, _HIDDEN)
        with emit.loop(args[1], []) as loop:
            offset = builder.mul(loop.index, INT64(VECTOR_BYTES))
            value = builder.fdiv(emit.load(emit.at(at, offset), FLOATS), divisor, flags=("nsz",))
            bits = builder.bitcast(value, INTS)
            is_least = builder.icmp_unsigned("==", bits, constant(INTS, INFINITY_BITS - 2**31))
            emit.store(builder.select(builder.or_(is_nan(emit, value), is_least), hidden, value), emit.at(out, offset))
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, types.float32, _INTP), generate


@emitted
def _exponents(
    typing: TypingContext, values: NumbaType, num_vectors: NumbaType, highest: NumbaType, out: NumbaType
) -> Intrinsic:
    """out = e^(values - highest)."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        at, highest, out = emit.pointer(args[0]), emit.splat(args[2]), emit.pointer(args[3])
        with emit.loop(args[1], []) as loop:
            offset = builder.mul(loop.index, INT64(VECTOR_BYTES))
            below = builder.fsub(emit.load(emit.at(at, offset), FLOATS), highest)
            emit.store(emit.power_of_two(builder.fmul(below, constant(FLOATS, LOG2_E))), emit.at(out, offset))
        return context.get_dummy_value()

    return types.void(_INTP, _INTP, types.float32, _INTP), generate
