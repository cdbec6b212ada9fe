"""Loops over rows between matrix products: norm, quantising, gate, rotary positions and the write to the KV cache.

What a product reads is a row of `a` and the row's factor, which is applied to the result: in fp32 the row itself, in
int8 `scale * (q - 128)` with q as unsigned bytes. A norm's own factor goes there too, so that normalising costs one
pass.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from engine.cpu.ir import LANES
from engine.cpu.jit import OPTIONS, jit
from engine.cpu.parts import head_of, write_head
from engine.cpu.vectors import (
    FLOAT_BYTES,
    KEYS,
    address,
    largest_magnitude,
    quantise_vectors,
    rotate_halves,
    scale_row,
    weigh_row,
)

_LEVELS = np.float32(127)


def put_row(values: Any, num_vectors: Any, out: Any, kind: Any) -> Any:
    """Write fp32 values as a row of `a`, of whose dtype `kind` is any number; returns its factor."""
    raise NotImplementedError


@overload(put_row, jit_options=OPTIONS)
def _put_row(values: Any, num_vectors: Any, out: Any, kind: Any) -> Any:
    return _quantise_row if kind == types.uint8 else _copy_row


def _copy_row(values: Any, num_vectors: Any, out: Any, kind: Any) -> Any:
    scale_row(values, num_vectors, np.float32(1.0), out)
    return np.float32(1.0)


def _quantise_row(values: Any, num_vectors: Any, out: Any, kind: Any) -> Any:
    largest = largest_magnitude(values, num_vectors)
    quantise_vectors(values, num_vectors, _LEVELS / largest, out)
    return largest / _LEVELS


@jit
def put_rows(x: Any, depth: Any, operand: Any, span: Any) -> None:
    """Rows [span[0], span[1]) of x [rows, width] into the operand, whose rows have `depth` elements."""
    num_vectors, step, a = x.shape[1] // LANES, x.shape[1] * FLOAT_BYTES, operand.a
    for r in range(span[0], span[1]):
        out = address(a) + r * depth * a.itemsize
        operand.factors[r] = put_row(address(x) + r * step, num_vectors, out, a[0])


@jit
def norm_rows(x: Any, norm: Any, depth: Any, operand: Any, span: Any) -> None:
    """As `put_rows`, after the root-mean-square norm: (weight [width], epsilon)."""
    width, a = x.shape[1], operand.a
    weighted, weight = np.empty(width, np.float32), address(norm[0])
    for r in range(span[0], span[1]):
        total = weigh_row(address(x) + r * width * FLOAT_BYTES, weight, width // LANES, address(weighted))
        out = address(a) + r * depth * a.itemsize
        factor = put_row(address(weighted), width // LANES, out, a[0])
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
def _rotate(heads: Any, cos: Any, sin: Any) -> None:
    """Heads, one behind the other. Halves are paired as in GPT-NeoX; the sine of the first half comes negated."""
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
def place_heads(qkv: Any, norms: Any, attending: Any, cache: Any, layer: Any, span: Any) -> None:
    """Rotate queries and keys of rows [span[0], span[1]) in place; write keys and values to their slots.

    qkv: flat [rows, num_heads + 2 * num_kv_heads, head_dim]; norms: ([2, head_dim], or [0, head_dim] without; epsilon).
    """
    shape, batch = attending.shape, attending.batch
    dim, num_heads, num_kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
    row_step = (num_heads + 2 * num_kv_heads) * dim
    layer_at = address(cache) + 2 * layer * shape.num_slots * num_kv_heads * shape.row_bytes
    for r in range(span[0], span[1]):
        heads = qkv[r * row_step : r * row_step + (num_heads + num_kv_heads) * dim]
        if len(norms[0]):
            for head in range(num_heads + num_kv_heads):
                weight = norms[0][0 if head < num_heads else 1]
                _norm_head(heads[head * dim : (head + 1) * dim], weight, norms[1])
        _rotate(heads, batch.cos[r], batch.sin[r])
        keys = address(qkv) + (r * row_step + num_heads * dim) * FLOAT_BYTES
        values = keys + num_kv_heads * dim * FLOAT_BYTES
        _write_heads(keys, values, (layer_at, batch.slots[r]), cache[0], shape)


@jit
def _write_heads(keys: Any, values: Any, place: Any, kind: Any, shape: Any) -> None:
    """One token's keys and values [num_kv_heads, head_dim], fp32 at these addresses, to the cache; `place`: (the
    layer's address, the token's slot).
    """
    token_bytes = shape.num_kv_heads * shape.row_bytes
    token = place[1] % KEYS
    part = place[0] + (place[1] - token) * token_bytes
    for head in range(shape.num_kv_heads):
        at, to = head * shape.head_dim * FLOAT_BYTES, head_of(part, head, shape, kind)
        write_head(keys + at, values + at, (to, to + shape.num_slots * token_bytes), token, shape, kind)


@jit
def write_tokens(keys: Any, values: Any, slots: Any, cache: Any, shape: Any) -> None:
    """Keys and values [num_tokens, num_kv_heads, head_dim] to their slots of a one-layer cache."""
    token_bytes = shape.num_kv_heads * shape.head_dim * FLOAT_BYTES
    for token in range(len(slots)):
        place, at = (address(cache), slots[token]), token * token_bytes
        _write_heads(address(keys) + at, address(values) + at, place, cache[0], shape)
