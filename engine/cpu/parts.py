"""A part of the KV cache: keys, or values, of 16 tokens of a layer, whichever way they lie.

fp32 and fp16 lie as rows, [16 tokens][heads][head_dim]; int8 head by head, see `byte_vectors.py`. Both have `row_bytes`
for each head of a token. `kind` is any number of the cache's dtype; which way is chosen while compiling.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from engine.cpu.byte_vectors import (
    LIMBS_TAIL,
    read_byte_keys,
    read_byte_values,
    split_query,
    write_key,
    write_value,
)
from engine.cpu.ir import LANES
from engine.cpu.jit import OPTIONS
from engine.cpu.vectors import FLOAT_BYTES, KEYS, address, read_rows, write_row


def head_of(part: Any, head: Any, shape: Any, kind: Any) -> Any:
    """Where a part has one of its heads."""
    raise NotImplementedError


@overload(head_of, jit_options=OPTIONS)
def _head_of(part: Any, head: Any, shape: Any, kind: Any) -> Any:
    return _head_of_bytes if kind == types.int8 else _head_of_rows


def _head_of_bytes(part: Any, head: Any, shape: Any, kind: Any) -> Any:
    return part + head * KEYS * shape.row_bytes


def _head_of_rows(part: Any, head: Any, shape: Any, kind: Any) -> Any:
    return part + head * shape.row_bytes


def write_head(key: Any, value: Any, places: Any, token: Any, shape: Any, kind: Any) -> None:
    """A token's key and value of one head, fp32; places: where the parts of keys and of values have that head."""
    raise NotImplementedError


@overload(write_head, jit_options=OPTIONS)
def _write_head(key: Any, value: Any, places: Any, token: Any, shape: Any, kind: Any) -> Any:
    return _write_bytes if kind == types.int8 else _write_rows


def _write_bytes(key: Any, value: Any, places: Any, token: Any, shape: Any, kind: Any) -> None:
    write_key(key, shape.head_dim // LANES, places[0], token)
    write_value(value, shape.head_dim // LANES, places[1], token)


def _write_rows(key: Any, value: Any, places: Any, token: Any, shape: Any, kind: Any) -> None:
    skipped = token * shape.num_kv_heads * shape.row_bytes
    write_row(key, shape.head_dim // LANES, places[0] + skipped, kind)
    write_row(value, shape.head_dim // LANES, places[1] + skipped, kind)


def read_keys(at: Any, shape: Any, out: Any, spare: Any, kind: Any) -> None:
    """16 keys of one head to `out`, a flat array, as fp32 [head_dim][16]; `spare` has room for as many."""
    raise NotImplementedError


@overload(read_keys, jit_options=OPTIONS)
def _read_keys(at: Any, shape: Any, out: Any, spare: Any, kind: Any) -> Any:
    return _read_keys_of_bytes if kind == types.int8 else _read_keys_of_rows


def _read_keys_of_bytes(at: Any, shape: Any, out: Any, spare: Any, kind: Any) -> None:
    read_byte_keys(at, shape.head_dim // LANES, address(out))


def _read_keys_of_rows(at: Any, shape: Any, out: Any, spare: Any, kind: Any) -> None:
    dim = shape.head_dim
    read_rows(at, shape.num_kv_heads * shape.row_bytes, dim // LANES, address(spare), kind)
    for d in range(dim):
        for key in range(KEYS):
            out[d * KEYS + key] = spare[key * dim + d]


def read_values(at: Any, shape: Any, out: Any, kind: Any) -> None:
    """16 value rows of one head to an address, as fp32 [16][head_dim]."""
    raise NotImplementedError


@overload(read_values, jit_options=OPTIONS)
def _read_values(at: Any, shape: Any, out: Any, kind: Any) -> Any:
    return _read_values_of_bytes if kind == types.int8 else _read_values_of_rows


def _read_values_of_bytes(at: Any, shape: Any, out: Any, kind: Any) -> None:
    read_byte_values(at, shape.head_dim // LANES, out)


def _read_values_of_rows(at: Any, shape: Any, out: Any, kind: Any) -> None:
    read_rows(at, shape.num_kv_heads * shape.row_bytes, shape.head_dim // LANES, out, kind)


def put_queries(query: Any, num_rows: Any, shape: Any, scratch: Any, kind: Any) -> Any:
    """Rows [num_rows, head_dim] of fp32 at an address as `group_vectors.score_keys` reads them: (address, step). Their
    factors go to scratch.factors.
    """
    raise NotImplementedError


@overload(put_queries, jit_options=OPTIONS)
def _put_queries(query: Any, num_rows: Any, shape: Any, scratch: Any, kind: Any) -> Any:
    return _split_queries if kind == types.int8 else _plain_queries


def _split_queries(query: Any, num_rows: Any, shape: Any, scratch: Any, kind: Any) -> Any:
    out, step = address(scratch.limbs), 2 * shape.head_dim + LIMBS_TAIL
    for row in range(num_rows):
        at = query + row * shape.head_dim * FLOAT_BYTES
        scratch.factors[row] = split_query(at, shape.head_dim // LANES, out + row * step)
    return out, step


def _plain_queries(query: Any, num_rows: Any, shape: Any, scratch: Any, kind: Any) -> Any:
    scratch.factors[:num_rows] = np.float32(1.0)
    return query, shape.head_dim * FLOAT_BYTES
