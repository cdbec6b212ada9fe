"""A segment of the KV cache: the keys, or the values, of 16 tokens of a layer, in the layout of each dtype.

fp32 and fp16 segments are rows, [16 tokens][heads][head_dim]. int8 segments are grouped by head, see
`byte_vectors.py`. Both have `row_bytes` bytes for each head of a token. `element` is any element of the cache; its
dtype selects the layout at compile time: compiled code calls the functions without a body, and `select_by_dtype`
replaces them.
"""

from typing import NamedTuple

import numpy as np
from numba import types

from engine.kernels.cpu.arguments import Address, Element, Floats, Matrix
from engine.kernels.cpu.batch import AttentionScratch, HeadShape
from engine.kernels.cpu.byte_vectors import (
    read_byte_keys,
    read_byte_values,
    split_query,
    write_key,
    write_value,
)
from engine.kernels.cpu.constants import FLOAT_BYTES, KEYS, LANES, LIMBS_TAIL_BYTES
from engine.kernels.cpu.jit import select_by_dtype
from engine.kernels.cpu.vectors import address, read_rows, write_row


class HeadSegments(NamedTuple):
    """One head in a segment of keys and in the segment of values of the same tokens."""

    keys: Address
    values: Address


def head_of(segment: Address, head: int, shape: HeadShape, element: Element) -> Address:
    """The address of a head in a segment."""
    raise NotImplementedError


def _head_of_bytes(segment: Address, head: int, shape: HeadShape, element: Element) -> Address:
    return segment + head * KEYS * shape.row_bytes


def _head_of_rows(segment: Address, head: int, shape: HeadShape, element: Element) -> Address:
    return segment + head * shape.row_bytes


def write_head(
    key: Address, value: Address, segments: HeadSegments, token: int, shape: HeadShape, element: Element
) -> None:
    """Write the fp32 key and value of one head to token 0 to 15 of its segments."""
    raise NotImplementedError


def _write_bytes(
    key: Address, value: Address, segments: HeadSegments, token: int, shape: HeadShape, element: Element
) -> None:
    write_key(key, shape.head_dim // LANES, segments.keys, token)
    write_value(value, shape.head_dim // LANES, segments.values, token)


def _write_rows(
    key: Address, value: Address, segments: HeadSegments, token: int, shape: HeadShape, element: Element
) -> None:
    offset = token * shape.num_kv_heads * shape.row_bytes
    write_row(key, shape.head_dim // LANES, segments.keys + offset, element)
    write_row(value, shape.head_dim // LANES, segments.values + offset, element)


def read_keys(head: Address, shape: HeadShape, out: Floats, spare: Floats, element: Element) -> None:
    """Convert the 16 keys of a head to fp32 [head_dim][16] in `out`, a flat array. `spare` must be of the same size."""
    raise NotImplementedError


def _read_keys_of_bytes(head: Address, shape: HeadShape, out: Floats, spare: Floats, element: Element) -> None:
    read_byte_keys(head, shape.head_dim // LANES, address(out))


def _read_keys_of_rows(head: Address, shape: HeadShape, out: Floats, spare: Floats, element: Element) -> None:
    dim = shape.head_dim
    read_rows(head, shape.num_kv_heads * shape.row_bytes, dim // LANES, address(spare), element)
    for d in range(dim):
        for key in range(KEYS):
            out[d * KEYS + key] = spare[key * dim + d]


def read_values(head: Address, shape: HeadShape, out: Address, element: Element) -> None:
    """Convert the 16 value rows of a head to fp32 [16][head_dim] at the address `out`."""
    raise NotImplementedError


def _read_values_of_bytes(head: Address, shape: HeadShape, out: Address, element: Element) -> None:
    read_byte_values(head, shape.head_dim // LANES, out)


def _read_values_of_rows(head: Address, shape: HeadShape, out: Address, element: Element) -> None:
    read_rows(head, shape.num_kv_heads * shape.row_bytes, shape.head_dim // LANES, out, element)


def prepare_queries(
    query: Address, num_rows: int, shape: HeadShape, scratch: AttentionScratch, element: Element
) -> Matrix:
    """Bring fp32 rows [num_rows, head_dim] into the form that `score_keys` reads.

    The factors of the rows' scores are written to scratch.factors. The result may be in scratch.limbs.
    """
    raise NotImplementedError


def _split_queries(
    query: Address, num_rows: int, shape: HeadShape, scratch: AttentionScratch, element: Element
) -> Matrix:
    out, step = address(scratch.limbs), 2 * shape.head_dim + LIMBS_TAIL_BYTES
    for row in range(num_rows):
        at = query + row * shape.head_dim * FLOAT_BYTES
        scratch.factors[row] = split_query(at, shape.head_dim // LANES, out + row * step)
    return Matrix(out, step)


def _plain_queries(
    query: Address, num_rows: int, shape: HeadShape, scratch: AttentionScratch, element: Element
) -> Matrix:
    scratch.factors[:num_rows] = np.float32(1.0)
    return Matrix(query, shape.head_dim * FLOAT_BYTES)


select_by_dtype(head_of, types.int8, _head_of_bytes, _head_of_rows)
select_by_dtype(write_head, types.int8, _write_bytes, _write_rows)
select_by_dtype(read_keys, types.int8, _read_keys_of_bytes, _read_keys_of_rows)
select_by_dtype(read_values, types.int8, _read_values_of_bytes, _read_values_of_rows)
select_by_dtype(prepare_queries, types.int8, _split_queries, _plain_queries)
