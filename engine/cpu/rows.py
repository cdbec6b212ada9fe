"""Loops over rows between matrix products: norm, quantising, gate, rotary positions and the write to the KV cache.

What a product reads is a row of `a` and the row's factor, which is applied to the result: in fp32 the row itself, in
int8 `scale * (q - 128)` with q as unsigned bytes. A norm's own factor goes there too, so that normalising costs one
pass.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from engine.cpu.jit import OPTIONS, jit
from engine.cpu.vectors import FLOAT_BYTES, address, largest_magnitude, quantise_vectors, rotate_halves, write_row

_LEVELS = np.float32(127)


def put_row(values: Any, out: Any) -> Any:
    """Write fp32 values, a multiple of 16 of them, as a row of `a`; returns its factor."""
    raise NotImplementedError


@overload(put_row, jit_options=OPTIONS)
def _put_row(values: Any, out: Any) -> Any:
    return _quantise_row if out.dtype == types.uint8 else _copy_row


def _copy_row(values: Any, out: Any) -> Any:
    for i in range(len(values)):
        out[i] = values[i]
    return np.float32(1.0)


def _quantise_row(values: Any, out: Any) -> Any:
    num_vectors = len(values) // 16
    largest = largest_magnitude(address(values), num_vectors)
    quantise_vectors(address(values), num_vectors, _LEVELS / largest, address(out))
    return largest / _LEVELS


@jit
def put_rows(x: Any, depth: Any, operand: Any, span: Any) -> None:
    """Rows [span[0], span[1]) of x [rows, width] into the operand, whose rows have `depth` elements."""
    width = x.shape[1]
    for r in range(span[0], span[1]):
        operand.factors[r] = put_row(x[r], operand.a[r * depth : r * depth + width])


@jit
def norm_rows(x: Any, norm: Any, depth: Any, operand: Any, span: Any) -> None:
    """As `put_rows`, after the root-mean-square norm: (weight [width], epsilon)."""
    width, weight = x.shape[1], norm[0]
    weighted = np.empty(width, np.float32)
    for r in range(span[0], span[1]):
        row = x[r]
        total = np.float32(0.0)
        for i in range(width):
            total += row[i] * row[i]
            weighted[i] = row[i] * weight[i]
        factor = put_row(weighted, operand.a[r * depth : r * depth + width])
        operand.factors[r] = factor / np.sqrt(total / np.float32(width) + norm[1])


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
    if half % 16 == 0:
        rotate_halves(address(head), address(cos), address(sin), half // 16)
        return
    for i in range(half):
        low, high = head[i], head[i + half]
        head[i] = low * cos[i] + high * sin[i]
        head[i + half] = high * cos[i + half] + low * sin[i + half]


@jit
def place_heads(qkv: Any, norms: Any, attending: Any, cache: Any, layer: Any, span: Any) -> None:
    """Rotate queries and keys of rows [span[0], span[1]) in place; write keys and values to their slots.

    qkv: flat [rows, num_heads + 2 * num_kv_heads, head_dim]; norms: ([2, head_dim], or [0, head_dim] without; epsilon).
    """
    shape, batch = attending.shape, attending.batch
    dim, num_heads, num_kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
    row_step = (num_heads + 2 * num_kv_heads) * dim
    layer_at = address(cache) + 2 * layer * shape.num_slots * num_kv_heads * shape.row_bytes
    for r in range(span[0], span[1]):
        for head in range(num_heads + num_kv_heads):
            at = r * row_step + head * dim
            values = qkv[at : at + dim]
            if len(norms[0]):
                _norm_head(values, norms[0][0 if head < num_heads else 1], norms[1])
            _rotate(values, batch.cos[r], batch.sin[r])
        keys = address(qkv) + (r * row_step + num_heads * dim) * FLOAT_BYTES
        slot = layer_at + batch.slots[r] * num_kv_heads * shape.row_bytes
        _write_heads(keys, keys + num_kv_heads * dim * FLOAT_BYTES, slot, cache[0], shape)


@jit
def _write_heads(keys: Any, values: Any, slot: Any, kind: Any, shape: Any) -> None:
    """One token's keys and values [num_kv_heads, head_dim], fp32 at these addresses, to its slot of the cache."""
    half_layer = shape.num_slots * shape.num_kv_heads * shape.row_bytes
    for head in range(shape.num_kv_heads):
        at, to = head * shape.head_dim * FLOAT_BYTES, slot + head * shape.row_bytes
        write_row(keys + at, shape.head_dim // 16, to, kind)
        write_row(values + at, shape.head_dim // 16, to + half_layer, kind)


@jit
def write_tokens(keys: Any, values: Any, slots: Any, cache: Any, shape: Any) -> None:
    """Keys and values [num_tokens, num_kv_heads, head_dim] to their slots of a one-layer cache."""
    token_bytes = shape.num_kv_heads * shape.head_dim * FLOAT_BYTES
    for token in range(len(slots)):
        slot = address(cache) + slots[token] * shape.num_kv_heads * shape.row_bytes
        at = token * token_bytes
        _write_heads(address(keys) + at, address(values) + at, slot, cache[0], shape)
