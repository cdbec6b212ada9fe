"""A row of the left operand of products, of all types: copied, rounded or quantised."""

from typing import Any

import numpy as np
from numba import types

from engine.kernels.cpu.arguments import Address, Element
from engine.kernels.cpu.compilation.parts import select_by_dtype
from engine.kernels.cpu.compilation.pieces import Piece, caller, element_of
from engine.kernels.cpu.machine import BLOCK_HEAD_BYTES, INT8_LEVELS, LANES, VECTOR_BYTES
from engine.kernels.cpu.products.nibble_blocks import quantise_block
from engine.kernels.cpu.vectors import largest_magnitude, quantise_vectors, scale_row, to_bf16

_LEVELS = np.float32(INT8_LEVELS)


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
        count = min(per_block, num_vectors - first)
        quantise_block(values + first * VECTOR_BYTES, count, per_block - count, out)
        out += group + BLOCK_HEAD_BYTES
    return np.float32(1.0)


def _round_row(values: Address, num_vectors: int, out: Address, group: int, element: Element) -> np.float32:
    to_bf16(values, num_vectors, out)
    return np.float32(1.0)


_ROWS = {types.uint8: _quantise_row, types.uint16: _quantise_row, types.int8: _quantise_groups, types.int16: _round_row}
select_by_dtype(put_row, _ROWS, _copy_row)


@Piece
def put_values(kind: Any, values: Address, num_vectors: int, out: Address, group: int) -> np.float32:
    """`put_row`. kind: of the operand."""
    return put_row(values, num_vectors, out, group, element_of(kind))


call_put_values = caller(put_values)
