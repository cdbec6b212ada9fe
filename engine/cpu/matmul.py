"""Matrix products over packed weights, each with what follows it: store, add to the residual, or gate.

Columns are worked on in units of 64, rows in tiles; a unit's weights come from memory once and stay in the cache while
the rows pass by. In int8 sums are exact integers and in fp32 always added in the same order, so a row's result does not
depend on the batch it is in.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from engine.cpu.jit import OPTIONS, jit
from engine.cpu.rows import ZERO_POINT
from engine.cpu.scalars import silu
from engine.cpu.tiles import configure_amx, multiply_amx_tile, multiply_tile, release_amx

UNIT = 64
"""Columns of a unit."""
TILE_ROWS = 32
"""Most rows of a tile; rows beyond the last are read, and their results dropped."""
_AMX_MIN_ROWS = 5


class Weights(NamedTuple):
    """All matrices of a model. Columns are padded to units; `matrices[i]`: offset of the weights, offset of the columns,
    elements of a row of `a`, columns that count.
    """

    packed: Any  # flat int8 or fp32, panels of 16 columns
    scales: Any  # flat fp32, for each column
    offsets: Any  # flat, for each column: subtracted from sums (int8: what the zero point of `a` added)
    biases: Any  # flat fp32
    matrices: Any  # [num_matrices, 4] int64


class Operand(NamedTuple):
    """What is multiplied: rows of `a`, and a factor for each row's result."""

    a: Any  # flat uint8 or fp32; TILE_ROWS rows beyond the last may be read
    factors: Any  # [rows]
    sums: Any  # a thread's own [TILE_ROWS, UNIT], int32 or fp32
    amx: Any  # 64 bytes that configure the tile registers; empty: no AMX


def _sum_tile(operand: Any, row: int, rows: int, weights: Any, at: Any) -> Any:
    """Fill `operand.sums` for rows from `row` on, at most `rows`, and one unit of columns; returns how many it did."""
    raise NotImplementedError


@overload(_sum_tile, jit_options=OPTIONS)
def _overload_sum_tile(operand: Any, row: int, rows: int, weights: Any, at: Any) -> Any:
    return _sum_int8 if operand.types[0].dtype == types.uint8 else _sum_float


def _sum_int8(operand: Any, row: int, rows: int, weights: Any, at: Any) -> Any:
    b_at, depth = at
    a, sums, panel = (operand.a, row * depth), (operand.sums, 0), 16 * depth
    b, other = (weights.packed, b_at), (weights.packed, b_at + 2 * panel)
    if len(operand.amx) and rows >= _AMX_MIN_ROWS:
        right = (operand.sums, 32)
        if rows > 16:
            multiply_amx_tile(a, depth, b, panel, depth // 64, sums, UNIT, 2)
            multiply_amx_tile(a, depth, other, panel, depth // 64, right, UNIT, 2)
            return 32
        multiply_amx_tile(a, depth, b, panel, depth // 64, sums, UNIT, 1)
        multiply_amx_tile(a, depth, other, panel, depth // 64, right, UNIT, 1)
        return 16
    if rows >= 5:
        multiply_tile(a, depth, b, panel, depth // 4, sums, UNIT, 6, 4)
        return 6
    if rows >= 3:
        multiply_tile(a, depth, b, panel, depth // 4, sums, UNIT, 4, 4)
        return 4
    if rows == 2:
        multiply_tile(a, depth, b, panel, depth // 4, sums, UNIT, 2, 4)
        return 2
    multiply_tile(a, depth, b, panel, depth // 4, sums, UNIT, 1, 4)
    return 1


def _sum_float(operand: Any, row: int, rows: int, weights: Any, at: Any) -> Any:
    b_at, depth = at
    a, sums, panel = (operand.a, row * depth), (operand.sums, 0), 16 * depth
    b = (weights.packed, b_at)
    if rows >= 5:
        other, right = (weights.packed, b_at + 2 * panel), (operand.sums, 32)
        if rows >= 9:
            multiply_tile(a, depth, b, panel, depth, sums, UNIT, 12, 2)
            multiply_tile(a, depth, other, panel, depth, right, UNIT, 12, 2)
            return 12
        multiply_tile(a, depth, b, panel, depth, sums, UNIT, 8, 2)
        multiply_tile(a, depth, other, panel, depth, right, UNIT, 8, 2)
        return 8
    if rows >= 3:
        multiply_tile(a, depth, b, panel, depth, sums, UNIT, 4, 4)
        return 4
    if rows == 2:
        multiply_tile(a, depth, b, panel, depth, sums, UNIT, 2, 4)
        return 2
    multiply_tile(a, depth, b, panel, depth, sums, UNIT, 1, 4)
    return 1


def _without(total: Any, offset: Any) -> Any:
    """A sum without its column's offset, as fp32."""
    raise NotImplementedError


@overload(_without, jit_options=OPTIONS)
def _overload_without(total: Any, offset: Any) -> Any:
    return _without_offset if total == types.int32 else _as_it_is


def _without_offset(total: Any, offset: Any) -> Any:
    return np.float32(np.int32(total - offset))


def _as_it_is(total: Any, offset: Any) -> Any:
    return total


@jit
def sum_tile(operand: Any, row: int, rows: int, weights: Any, at: Any) -> Any:
    """See `_sum_tile`; compiled once for all products."""
    return _sum_tile(operand, row, rows, weights, at)


@jit
def begin_products(operand: Any) -> None:
    """Called by each thread before its products."""
    if len(operand.amx):
        configure_amx(operand.amx)


@jit
def end_products(operand: Any) -> None:
    """Called by each thread after its products."""
    if len(operand.amx):
        release_amx()


@jit
def _units(columns: int, share: Any) -> Any:
    """The thread's units of a matrix: first, and the one after the last."""
    count = (columns + UNIT - 1) // UNIT
    return count * share[0] // share[1], count * (share[0] + 1) // share[1]


@jit
def product(operand: Any, rows: int, weights: Any, matrix: int, out: Any, share: Any) -> None:
    """out [rows, columns] = operand @ matrix + bias, the columns of this thread's share (index, count)."""
    weight_at, column_at, depth, columns = weights.matrices[matrix]
    first, end = _units(columns, share)
    for unit in range(first, end):
        at, width = column_at + unit * UNIT, min(UNIT, columns - unit * UNIT)
        scales, offsets, biases = weights.scales[at : at + UNIT], weights.offsets[at : at + UNIT], weights.biases[at : at + UNIT]
        row = 0
        while row < rows:
            done = sum_tile(operand, row, rows - row, weights, (weight_at + unit * UNIT * depth, depth))
            for r in range(min(done, rows - row)):
                sums, factor = operand.sums[r * UNIT : r * UNIT + width], operand.factors[row + r]
                target = out[row + r, unit * UNIT : unit * UNIT + width]
                for j in range(len(sums)):
                    target[j] = _without(sums[j], offsets[j]) * scales[j] * factor + biases[j]
            row += done


@jit
def add_product(operand: Any, rows: int, weights: Any, matrix: int, out: Any, share: Any) -> None:
    """out += operand @ matrix + bias, as `product`."""
    weight_at, column_at, depth, columns = weights.matrices[matrix]
    first, end = _units(columns, share)
    for unit in range(first, end):
        at, width = column_at + unit * UNIT, min(UNIT, columns - unit * UNIT)
        scales, offsets, biases = weights.scales[at : at + UNIT], weights.offsets[at : at + UNIT], weights.biases[at : at + UNIT]
        row = 0
        while row < rows:
            done = sum_tile(operand, row, rows - row, weights, (weight_at + unit * UNIT * depth, depth))
            for r in range(min(done, rows - row)):
                sums, factor = operand.sums[r * UNIT : r * UNIT + width], operand.factors[row + r]
                target = out[row + r, unit * UNIT : unit * UNIT + width]
                for j in range(len(sums)):
                    target[j] += _without(sums[j], offsets[j]) * scales[j] * factor + biases[j]
            row += done


@jit
def gated_product(operand: Any, rows: int, weights: Any, matrix: int, out: Any, share: Any) -> None:
    """out [rows, columns / 2] = silu(gate) * up, for a matrix whose panels of 16 columns are gate and up by turns."""
    weight_at, column_at, depth, columns = weights.matrices[matrix]
    first, end = _units(columns, share)
    for unit in range(first, end):
        at = column_at + unit * UNIT
        row = 0
        while row < rows:
            done = sum_tile(operand, row, rows - row, weights, (weight_at + unit * UNIT * depth, depth))
            for r in range(min(done, rows - row)):
                factor = operand.factors[row + r]
                for pair in range(2):
                    begun = unit * (UNIT // 2) + pair * 16
                    if begun >= out.shape[1]:
                        break
                    gates, ups = _part(operand, weights, r, at, 2 * pair), _part(operand, weights, r, at, 2 * pair + 1)
                    target = out[row + r, begun : begun + 16]
                    for j in range(len(target)):
                        gate = _without(gates[0][j], gates[1][j]) * gates[2][j] * factor + gates[3][j]
                        up = _without(ups[0][j], ups[1][j]) * ups[2][j] * factor + ups[3][j]
                        target[j] = silu(gate) * up
            row += done


@jit
def _part(operand: Any, weights: Any, r: int, at: int, panel: int) -> Any:
    """16 sums of row `r`, with their columns' offsets, scales and biases."""
    sums = operand.sums[r * UNIT + panel * 16 : r * UNIT + panel * 16 + 16]
    begun, end = at + panel * 16, at + panel * 16 + 16
    return sums, weights.offsets[begun:end], weights.scales[begun:end], weights.biases[begun:end]
