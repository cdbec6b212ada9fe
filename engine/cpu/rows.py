"""Loops over rows between matrix products: norm, quantising, gate, rotary positions and the write to the KV cache.

What a product reads is a row of `a` and the row's factor, which is applied to the result: in fp32 the row itself, in int8
`scale * (q - 128)` with q as unsigned bytes. A norm's own factor goes there too, so that normalising costs one pass.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from engine.cpu.jit import OPTIONS, jit
from engine.cpu.scalars import float_of_bits
from engine.cpu.vectors import address, write_row

ZERO_POINT = 128
_LEVELS = np.float32(127)
_TINY_BITS = np.int32(np.float32(1e-20).view(np.int32))


def put_row(values: Any, out: Any) -> Any:
    """Write fp32 values as a row of `a`; returns its factor."""
    raise NotImplementedError


@overload(put_row, jit_options=OPTIONS)
def _put_row(values: Any, out: Any) -> Any:
    return _quantise_row if out.dtype == types.uint8 else _copy_row


def _copy_row(values: Any, out: Any) -> Any:
    for i in range(len(values)):
        out[i] = values[i]
    return np.float32(1.0)


def _quantise_row(values: Any, out: Any) -> Any:
    # The largest magnitude is found among bit patterns: compilers use vectors for integers and not for floats there.
    bits = values.view(np.int32)
    largest = _TINY_BITS
    for i in range(len(values)):
        magnitude = bits[i] & np.int32(0x7FFFFFFF)
        largest = magnitude if magnitude > largest else largest
    maximum = float_of_bits(largest)
    factor = _LEVELS / maximum
    for i in range(len(values)):
        out[i] = np.uint8(np.int32(values[i] * factor + np.float32(ZERO_POINT + 0.5)))
    return maximum / _LEVELS


@jit
def put_rows(x: Any, depth: int, operand: Any, first: int, end: int) -> None:
    """Rows [first, end) of x [rows, width] into the operand, whose rows have `depth` elements."""
    width = x.shape[1]
    for r in range(first, end):
        operand.factors[r] = put_row(x[r], operand.a[r * depth : r * depth + width])


@jit
def norm_rows(x: Any, weight: Any, eps: Any, depth: int, operand: Any, first: int, end: int) -> None:
    """As `put_rows`, after the root-mean-square norm with `weight` [width]."""
    width = x.shape[1]
    weighted = np.empty(width, np.float32)
    for r in range(first, end):
        row = x[r]
        total = np.float32(0.0)
        for i in range(width):
            total += row[i] * row[i]
            weighted[i] = row[i] * weight[i]
        factor = put_row(weighted, operand.a[r * depth : r * depth + width])
        operand.factors[r] = factor / np.sqrt(total / np.float32(width) + eps)


@jit
def _norm_head(head: Any, weight: Any, eps: Any) -> None:
    total = np.float32(0.0)
    for i in range(len(head)):
        total += head[i] * head[i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(len(head)) + eps)
    for i in range(len(head)):
        head[i] *= factor * weight[i]


@jit
def _rotate(head: Any, cos: Any, sin: Any) -> None:
    """Halves are paired as in GPT-NeoX; the sine of the first half comes negated."""
    half = len(head) // 2
    for i in range(half):
        low, high = head[i], head[i + half]
        head[i] = low * cos[i] + high * sin[i]
        head[i + half] = high * cos[i + half] + low * sin[i + half]


@jit
def place_heads(qkv: Any, head_norms: Any, eps: Any, batch: Any, cache: Any, shape: Any, layer: int, rows: Any) -> None:
    """Rotate queries and keys of rows [rows[0], rows[1]) in place; write keys and values to their slots.

    qkv: [rows, num_heads + 2 * num_kv_heads, head_dim] flat; head_norms: [2, head_dim], or [0, head_dim] without.
    """
    dim, num_heads, num_kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
    row_step = (num_heads + 2 * num_kv_heads) * dim
    kind, cache_at = cache[0], address(cache)
    half_layer = shape.num_slots * num_kv_heads * shape.row_bytes
    for r in range(rows[0], rows[1]):
        for head in range(num_heads + num_kv_heads):
            at = r * row_step + head * dim
            values = qkv[at : at + dim]
            if len(head_norms):
                _norm_head(values, head_norms[0 if head < num_heads else 1], eps)
            _rotate(values, batch.cos[r], batch.sin[r])
        slot = cache_at + 2 * layer * half_layer + batch.slots[r] * num_kv_heads * shape.row_bytes
        keys_at = address(qkv) + (r * row_step + num_heads * dim) * 4
        write_heads(keys_at, keys_at + num_kv_heads * dim * 4, slot, kind, shape)


@jit
def write_heads(keys: int, values: int, slot: int, kind: Any, shape: Any) -> None:
    """One token's keys and values [num_kv_heads, head_dim], fp32 at these addresses, to its slot of the cache."""
    half_layer = shape.num_slots * shape.num_kv_heads * shape.row_bytes
    for head in range(shape.num_kv_heads):
        at, to = head * shape.head_dim * 4, slot + head * shape.row_bytes
        write_row(keys + at, shape.head_dim // 16, to, kind)
        write_row(values + at, shape.head_dim // 16, to + half_layer, kind)


@jit
def write_tokens(keys: Any, values: Any, slots: Any, cache: Any, shape: Any) -> None:
    """Keys and values [num_tokens, num_kv_heads, head_dim] to their slots of a one-layer cache."""
    token_bytes = shape.num_kv_heads * shape.head_dim * 4
    for token in range(len(slots)):
        slot = address(cache) + slots[token] * shape.num_kv_heads * shape.row_bytes
        write_heads(address(keys) + token * token_bytes, address(values) + token * token_bytes, slot, cache[0], shape)
