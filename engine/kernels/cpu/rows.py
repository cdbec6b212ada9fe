"""Loops over rows between matrix products: norm, quantisation, rotary positions and the write to the KV cache.

A product reads a row of `a` and the row's factor, which is applied to the result. In fp32 the row is copied, in bf16
rounded. For int8 weights it is `scale * (q - 128)` with q as unsigned bytes or, on CPUs without VNNI, `scale * q` with
q as int16; for int4, signed bytes with a scale for each group. A norm's own factor is multiplied into the row's factor,
so that the norm costs a single pass. A matrix may have its inputs in another order, in which the row's numbers are
gathered first.
"""

from typing import NamedTuple

import numpy as np
from numba import types

from engine.kernels.cpu.arguments import (
    Address,
    Array,
    Attending,
    Cache,
    Element,
    Floats,
    HeadShape,
    Int32s,
    Int64s,
    LayerPlace,
    Operand,
    Range,
    Weights,
)
from engine.kernels.cpu.compiler import entry, jit
from engine.kernels.cpu.head_norms import HeadNorms, norm_heads
from engine.kernels.cpu.kv_segments import HeadSegments, head_of, write_head
from engine.kernels.cpu.machine import FLOAT_BYTES, INT8_LEVELS, KEYS, LANES, VECTOR_BYTES
from engine.kernels.cpu.nibbles import BLOCK_HEAD_BYTES, quantise_block
from engine.kernels.cpu.parts import select_by_dtype
from engine.kernels.cpu.vectors import (
    address,
    largest_magnitude,
    mix_rows,
    quantise_vectors,
    rotate_halves,
    scale_row,
    to_bf16,
    weigh_row,
)

_LEVELS = np.float32(INT8_LEVELS)


class Norm(NamedTuple):
    """The parameters of a norm of rows: a root-mean-square norm, or, with a bias, a layer norm."""

    weight: Floats  # [1, width]; [2, width]: weights, then biases
    eps: np.float32


class TokenSlot(NamedTuple):
    """A token's place in a layer of the cache."""

    layer: Address
    slot: int


def put_row(values: Address, num_vectors: int, out: Address, group: int, element: Element) -> np.float32:
    """Write fp32 values as a row of `a`; returns the row's factor. `element`: any element of `a`."""
    raise NotImplementedError


def _copy_row(values: Address, num_vectors: int, out: Address, group: int, element: Element) -> np.float32:
    scale_row(values, num_vectors, np.float32(1.0), out)
    return np.float32(1.0)


def _quantise_row(values: Address, num_vectors: int, out: Address, group: int, element: Element) -> np.float32:
    largest = largest_magnitude(values, num_vectors)
    quantise_vectors(values, num_vectors, _LEVELS / largest, out, element)
    return largest / _LEVELS


def _quantise_groups(values: Address, num_vectors: int, out: Address, group: int, element: Element) -> np.float32:
    per_block = group // LANES
    for first in range(0, num_vectors, per_block):
        quantise_block(values + first * VECTOR_BYTES, min(per_block, num_vectors - first), out)
        out += group + BLOCK_HEAD_BYTES
    return np.float32(1.0)


def _round_row(values: Address, num_vectors: int, out: Address, group: int, element: Element) -> np.float32:
    to_bf16(values, num_vectors, out)
    return np.float32(1.0)


_ROWS = {types.uint8: _quantise_row, types.uint16: _quantise_row, types.int8: _quantise_groups, types.int16: _round_row}
select_by_dtype(put_row, _ROWS, _copy_row)


@jit
def put_rows(x: Floats, width: int, weights: Weights, matrix: int, operand: Operand, part: Range) -> None:
    """Write the first `width` numbers of the rows of x in the range to the operand of a product with a matrix."""
    depth = weights.matrices[matrix, 2]
    for r in range(part.first, part.end):
        operand.factors[r] = put_row_at(x[r, :width], weights, matrix, operand.a, r * depth)


@jit
def norm_rows(x: Floats, norm: Norm, weights: Weights, matrix: int, operand: Operand, part: Range) -> None:
    """Like `put_rows`, after a norm of each row."""
    depth, normed = weights.matrices[matrix, 2], np.empty(x.shape[1], np.float32)
    for r in range(part.first, part.end):
        divisor = norm_row(x[r], norm, normed)
        operand.factors[r] = put_row_at(normed, weights, matrix, operand.a, r * depth) / divisor


@jit
def put_row_at(x: Floats, weights: Weights, matrix: int, a: Array, first: int) -> np.float32:
    """Write x [width] as a row of `a`, which is the operand of a product with a matrix, from element number `first` on.
    Returns the row's factor.
    """
    width, at = len(x), address(a) + first * a.itemsize
    group, order_end = weights.matrices[matrix, 4], weights.matrices[matrix, 5]
    if not order_end:
        return put_row(address(x), width // LANES, at, group, a[0])
    gathered = np.empty(width, np.float32)
    _gather(x, weights.orders[order_end - width : order_end], gathered)
    return put_row(address(gathered), width // LANES, at, group, a[0])


@jit
def norm_row(x: Floats, norm: Norm, out: Floats) -> np.float32:
    """Write the norm of one row to `out`, but for a divisor, which is returned."""
    width = len(x)
    if len(norm.weight) == 1:
        total = weigh_row(address(x), address(norm.weight), width // LANES, address(out))
        return np.sqrt(total / np.float32(width) + norm.eps)
    mean, total = np.float32(0.0), np.float32(0.0)
    for i in range(width):
        mean += x[i]
    mean /= np.float32(width)
    for i in range(width):
        out[i] = x[i] - mean
        total += out[i] * out[i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(width) + norm.eps)
    for i in range(width):
        out[i] = out[i] * factor * norm.weight[0, i] + norm.weight[1, i]
    return np.float32(1.0)


@jit
def put_normed(x: Floats, norm: Norm, out: Floats, part: Range) -> None:
    """out = norm(x), for the rows in the range; `out` may be x."""
    width = x.shape[1]
    for r in range(part.first, part.end):
        at, divisor = address(out) + r * width * FLOAT_BYTES, norm_row(x[r], norm, out[r])
        scale_row(at, width // LANES, np.float32(1.0) / divisor, at)


@jit
def add_normed(x: Floats, norm: Norm, scale: np.float32, out: Floats, part: Range) -> None:
    """out = (out + norm(x)) * scale, for the rows in the range."""
    width = x.shape[1]
    normed = np.empty(width, np.float32)
    for r in range(part.first, part.end):
        factor = scale / norm_row(x[r], norm, normed)
        mix_rows(address(normed), width // LANES, factor, scale, address(out) + r * width * FLOAT_BYTES)


@jit
def _gather(row: Floats, order: Int32s, out: Floats) -> None:
    for i in range(len(order)):
        out[i] = row[order[i]]


@jit
def rotate(heads: Floats, cos: Floats, sin: Floats) -> None:
    """Apply rotary positions to contiguous heads in place. Halves are paired as in GPT-NeoX; the first half of `sin` is
    negated.
    """
    dim = len(cos)
    half = dim // 2
    if half % LANES == 0:
        rotate_halves(address(heads), len(heads) // dim, address(cos), address(sin), half // LANES)
        return
    for at in range(0, len(heads), dim):
        for i in range(half):
            low, high = heads[at + i], heads[at + i + half]
            heads[at + i] = low * cos[i] + high * sin[i]
            heads[at + i + half] = high * cos[i + half] + low * sin[i + half]


@jit
def rotate_and_store(
    qkv: Floats, norms: HeadNorms, attending: Attending, cache: Cache, place: LayerPlace, rope: int, part: Range
) -> None:
    """Normalise and rotate queries and keys of the rows in the range, in place; write keys and values to the cache.

    qkv: flat [rows, step of queries], of which the first num_heads + 2 * num_kv_heads heads are used, or num_heads if
    the layer reads the KV of another. rope: the kind of the layer's rotary positions in `Batch`.
    """
    shape, batch = attending.shape, attending.batch
    dim, num_heads, num_kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
    row_step = attending.queries.step
    layer_at = address(cache) + shape.num_planes * place.number * shape.num_slots * num_kv_heads * shape.row_bytes
    num_rotated = (num_heads + (num_kv_heads if place.is_own else 0)) * dim
    num_normed = num_rotated + (num_kv_heads * dim if place.is_own and norms.values else 0)
    for r in range(part.first, part.end):
        heads = qkv[r * row_step : r * row_step + num_rotated]
        if len(norms.weight) and not norms.rotated:
            norm_heads(qkv[r * row_step : r * row_step + num_normed], norms, shape, r)
        if len(batch.cos):
            rotate(heads, batch.cos[rope, r, :dim], batch.sin[rope, r, :dim])
        if len(norms.weight) and norms.rotated:
            norm_heads(heads, norms, shape, r)
        if len(batch.query_factors):
            for i in range(num_heads * dim):
                heads[i] *= batch.query_factors[rope, r]
        if place.is_own:
            keys = address(qkv) + (r * row_step + num_heads * dim) * FLOAT_BYTES
            values = keys + num_kv_heads * dim * FLOAT_BYTES
            write_heads(keys, values, TokenSlot(layer_at, batch.slots[r, place.group]), cache[0], shape)


@jit
def write_heads(keys: Address, values: Address, token_slot: TokenSlot, element: Element, shape: HeadShape) -> None:
    """Write one token's fp32 keys and values [num_kv_heads, head_dim] to its slot."""
    token_bytes = shape.num_kv_heads * shape.row_bytes
    token = token_slot.slot % KEYS
    segment = token_slot.layer + (token_slot.slot - token) * token_bytes
    for head in range(shape.num_kv_heads):
        at, target = head * shape.head_dim * FLOAT_BYTES, head_of(segment, head, shape, element)
        segments = HeadSegments(target, target + (shape.num_planes - 1) * shape.num_slots * token_bytes)
        write_head(keys + at, values + at, segments, token, shape, element)


@entry
def write_tokens(keys: Floats, values: Floats, slots: Int64s, cache: Cache, shape: HeadShape) -> None:
    """Write keys and values [num_tokens, num_kv_heads, head_dim] to their slots of a one-layer cache."""
    token_bytes = shape.num_kv_heads * shape.head_dim * FLOAT_BYTES
    for token in range(len(slots)):
        token_slot, at = TokenSlot(address(cache), slots[token]), token * token_bytes
        write_heads(address(keys) + at, address(values) + at, token_slot, cache[0], shape)
