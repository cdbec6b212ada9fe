"""Loops over rows between matrix products: norm, quantisation, rotary positions and the write to the KV cache.

A product reads a row of `a` and the row's factor, which is applied to the result. In fp32 the row is copied, in bf16
rounded. For int8 weights, and int4 in steps of int8, it is `scale * (q - 128)` with q as unsigned bytes or, on CPUs
without VNNI, `scale * q` with q as int16; for int4 with scales, signed bytes with a scale for each group. A norm's own
factor is multiplied into the row's factor, so that the norm costs a single pass. A matrix may have its inputs in
another order, in which the row's numbers are gathered first.
"""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.arguments import (
    DEPTH,
    GROUP,
    ORDER_END,
    Attending,
    Cache,
    Floats,
    Int32s,
    LayerPlace,
    Operand,
    Range,
    Weights,
)
from engine.kernels.cpu.attention.cache_rows import TokenSlot, call_write_token
from engine.kernels.cpu.attention.head_norms import HeadNorms, norm_heads
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES
from engine.kernels.cpu.products.operand_rows import call_put_values
from engine.kernels.cpu.vectors import (
    address,
    mix_rows,
    rotate_halves,
    scale_row,
    weigh_row,
)


class Norm(NamedTuple):
    """The parameters of a norm of rows: a root-mean-square norm, or, with a bias, a layer norm."""

    weight: Floats  # [1, width]; [2, width]: weights, then biases
    eps: np.float32


@jit
def put_rows(x: Floats, width: int, weights: Weights, matrix: int, operand: Operand, own: Range) -> None:
    """Write the first `width` numbers of the rows of x in the range to the operand of a product with a matrix."""
    depth = weights.matrices[matrix, DEPTH]
    for r in range(own.first, own.end):
        operand.factors[r] = put_row_at(x[r, :width], weights, matrix, operand, r * depth)


@jit
def norm_rows(x: Floats, norm: Norm, weights: Weights, matrix: int, operand: Operand, own: Range) -> None:
    """Like `put_rows`, after a norm of each row."""
    depth, normed = weights.matrices[matrix, DEPTH], np.empty(x.shape[1], np.float32)
    for r in range(own.first, own.end):
        divisor = norm_row(x[r], norm, normed)
        operand.factors[r] = put_row_at(normed, weights, matrix, operand, r * depth) / divisor


@jit
def put_row_at(x: Floats, weights: Weights, matrix: int, operand: Operand, first: int) -> np.float32:
    """Write x [width] as a row of the operand of a product with a matrix, from element number `first` on. Returns the
    row's factor.
    """
    width, at = len(x), address(operand.a) + first * operand.code.operand_bytes
    group, order_end = weights.matrices[matrix, GROUP], weights.matrices[matrix, ORDER_END]
    if not order_end:
        return call_put_values(operand.code.put, (address(x), width // LANES, at, group))
    gathered = np.empty(width, np.float32)
    _gather(x, weights.orders[order_end - width : order_end], gathered)
    return call_put_values(operand.code.put, (address(gathered), width // LANES, at, group))


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
def put_normed(x: Floats, norm: Norm, out: Floats, own: Range) -> None:
    """out = norm(x), for the rows in the range; `out` may be x."""
    width = x.shape[1]
    for r in range(own.first, own.end):
        at, divisor = address(out) + r * width * FLOAT_BYTES, norm_row(x[r], norm, out[r])
        scale_row(at, width // LANES, np.float32(1.0) / divisor, at)


@jit
def add_normed(x: Floats, norm: Norm, scale: np.float32, out: Floats, own: Range) -> None:
    """out = (out + norm(x)) * scale, for the rows in the range."""
    width = x.shape[1]
    normed = np.empty(width, np.float32)
    for r in range(own.first, own.end):
        factor = scale / norm_row(x[r], norm, normed)
        mix_rows(address(normed), width // LANES, factor, scale, address(out) + r * width * FLOAT_BYTES)


@jit
def add_rows(x: Floats, out: Floats, own: Range) -> None:
    """out += x, for the rows in the range."""
    width, one = x.shape[1], np.float32(1.0)
    for r in range(own.first, own.end):
        offset = r * width * FLOAT_BYTES
        mix_rows(address(x) + offset, width // LANES, one, one, address(out) + offset)


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
    qkv: Floats, norms: HeadNorms, attending: Attending, cache: Cache, place: LayerPlace, rope: int, own: Range
) -> None:
    """Normalise and rotate queries and keys of the rows in the range, in place; write keys and values to the cache.

    qkv: flat [rows, step of queries], of which the first num_heads + 2 * num_kv_heads heads are used, or num_heads if
    the layer reads the KV of another. rope: the kind of the layer's rotary positions.
    """
    shape, batch, rotations = attending.shape, attending.batch, attending.batch.rotations
    dim, num_heads, num_kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
    row_step = attending.queries.step
    layer_at = address(cache) + shape.num_planes * place.number * shape.num_slots * num_kv_heads * shape.row_bytes
    num_rotated = (num_heads + (num_kv_heads if place.is_own else 0)) * dim
    num_normed = num_rotated + (num_kv_heads * dim if place.is_own and norms.values else 0)
    for r in range(own.first, own.end):
        heads = qkv[r * row_step : r * row_step + num_rotated]
        if len(norms.weight) and not norms.rotated:
            norm_heads(qkv[r * row_step : r * row_step + num_normed], norms, shape, r)
        if len(rotations.cos):
            rotate(heads, rotations.cos[rope, rotations.rows[r], :dim], rotations.sin[rope, rotations.rows[r], :dim])
        if len(norms.weight) and norms.rotated:
            norm_heads(heads, norms, shape, r)
        if len(rotations.query_factors):
            for i in range(num_heads * dim):
                heads[i] *= rotations.query_factors[rope, rotations.rows[r]]
        if place.is_own:
            keys = address(qkv) + (r * row_step + num_heads * dim) * FLOAT_BYTES
            values = keys + num_kv_heads * dim * FLOAT_BYTES
            slot = TokenSlot(layer_at, batch.slots[r, place.group])
            call_write_token(attending.code.write_token, (keys, values, slot, shape))
