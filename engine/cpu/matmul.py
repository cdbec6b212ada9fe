"""Matrix products over packed weights, each with what follows it: store, add to the residual, or gate.

Columns are worked on in units of 64, rows in tiles; a unit's weights come from memory once and stay in the cache while
the rows pass by. In int8 sums are exact integers and in fp32 always added in the same order, so a row's result does not
depend on the batch it is in.
"""

from typing import Any, NamedTuple

from numba import types
from numba.extending import overload

from engine.cpu.finish import finish, finish_gated
from engine.cpu.jit import OPTIONS, jit
from engine.cpu.tiles import PANEL, configure_amx, multiply_amx_tile, multiply_tile, release_amx
from engine.cpu.vectors import FLOAT_BYTES, address

UNIT = 64
"""Columns of a unit."""
TILE_ROWS = 32
"""Most rows of a tile; rows beyond the last are read, and their results dropped."""
_AMX_MIN_ROWS = 5


class Weights(NamedTuple):
    """All matrices of a model. Columns are padded to units; `matrices[i]`: offset of the weights, offset of the
    columns, elements of a row of `a`, columns that count.
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


def _sum_tile(operand: Any, row: Any, rows: Any, weights: Any, at: Any) -> Any:
    """Fill `operand.sums` for rows from `row` on, at most `rows`, and one unit of columns; returns how many it did."""
    raise NotImplementedError


@overload(_sum_tile, jit_options=OPTIONS)
def _overload_sum_tile(operand: Any, row: Any, rows: Any, weights: Any, at: Any) -> Any:
    return _sum_int8 if operand.types[0].dtype == types.uint8 else _sum_float


def _sum_int8(operand: Any, row: Any, rows: Any, weights: Any, at: Any) -> Any:
    b_at, depth = at
    panel = PANEL * depth
    a, sums = (operand.a, row * depth, depth), (operand.sums, 0, UNIT)
    b, other = (weights.packed, b_at, panel), (weights.packed, b_at + 2 * panel, panel)
    if len(operand.amx) and rows >= _AMX_MIN_ROWS:
        right = (operand.sums, 32, UNIT)
        if rows > 16:
            multiply_amx_tile(a, b, sums, depth // 64, 2)
            multiply_amx_tile(a, other, right, depth // 64, 2)
            return 32
        multiply_amx_tile(a, b, sums, depth // 64, 1)
        multiply_amx_tile(a, other, right, depth // 64, 1)
        return 16
    if rows >= 5:
        multiply_tile(a, b, sums, depth // 4, 6, 4)
        return 6
    if rows >= 3:
        multiply_tile(a, b, sums, depth // 4, 4, 4)
        return 4
    if rows == 2:
        multiply_tile(a, b, sums, depth // 4, 2, 4)
        return 2
    multiply_tile(a, b, sums, depth // 4, 1, 4)
    return 1


def _sum_float(operand: Any, row: Any, rows: Any, weights: Any, at: Any) -> Any:
    b_at, depth = at
    panel = PANEL * depth
    a, sums = (operand.a, row * depth, depth), (operand.sums, 0, UNIT)
    b = (weights.packed, b_at, panel)
    if rows >= 5:
        other, right = (weights.packed, b_at + 2 * panel, panel), (operand.sums, 32, UNIT)
        if rows >= 9:
            multiply_tile(a, b, sums, depth, 12, 2)
            multiply_tile(a, other, right, depth, 12, 2)
            return 12
        multiply_tile(a, b, sums, depth, 8, 2)
        multiply_tile(a, other, right, depth, 8, 2)
        return 8
    if rows >= 3:
        multiply_tile(a, b, sums, depth, 4, 4)
        return 4
    if rows == 2:
        multiply_tile(a, b, sums, depth, 2, 4)
        return 2
    multiply_tile(a, b, sums, depth, 1, 4)
    return 1


@jit
def sum_tile(operand: Any, row: Any, rows: Any, weights: Any, at: Any) -> Any:
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
def _units(columns: Any, share: Any) -> Any:
    """The thread's units of a matrix: first, and the one after the last."""
    count = (columns + UNIT - 1) // UNIT
    return count * share[0] // share[1], count * (share[0] + 1) // share[1]


@jit
def _columns(weights: Any, at: Any) -> Any:
    """Addresses of the columns' offsets, scales and biases from column `at` on."""
    skipped = at * FLOAT_BYTES
    return address(weights.offsets) + skipped, address(weights.scales) + skipped, address(weights.biases) + skipped


@jit
def product(operand: Any, weights: Any, matrix: Any, out: Any, adds: Any, share: Any) -> None:
    """out [rows, columns] = operand @ matrix + bias, or out += that if `adds`.

    `share` (index, count) says which columns are this thread's.
    """
    weight_at, column_at, depth, columns = weights.matrices[matrix]
    rows = len(out)
    first, end = _units(columns, share)
    sums, kind, out_at, out_step = address(operand.sums), operand.sums[0], address(out), out.shape[1] * FLOAT_BYTES
    for unit in range(first, end):
        columns_at = _columns(weights, column_at + unit * UNIT)
        num_vectors = min(UNIT, columns - unit * UNIT) // PANEL
        row = 0
        while row < rows:
            done = sum_tile(operand, row, rows - row, weights, (weight_at + unit * UNIT * depth, depth))
            for r in range(min(done, rows - row)):
                to = out_at + (row + r) * out_step + unit * UNIT * FLOAT_BYTES
                found = (sums + r * UNIT * FLOAT_BYTES, operand.factors[row + r], to, num_vectors)
                if adds:
                    finish(found, columns_at, 1, kind)
                else:
                    finish(found, columns_at, 0, kind)
            row += done


@jit
def gated_product(operand: Any, weights: Any, matrix: Any, out: Any, share: Any) -> None:
    """out [rows, columns / 2] = silu(gate) * up, for a matrix whose panels of 16 columns are gate and up by turns."""
    weight_at, column_at, depth, columns = weights.matrices[matrix]
    rows = len(out)
    first, end = _units(columns, share)
    sums, kind, out_at, out_step = address(operand.sums), operand.sums[0], address(out), out.shape[1] * FLOAT_BYTES
    for unit in range(first, end):
        columns_at = _columns(weights, column_at + unit * UNIT)
        num_vectors = min(UNIT, columns - unit * UNIT) // (2 * PANEL)
        row = 0
        while row < rows:
            done = sum_tile(operand, row, rows - row, weights, (weight_at + unit * UNIT * depth, depth))
            for r in range(min(done, rows - row)):
                to = out_at + (row + r) * out_step + unit * UNIT // 2 * FLOAT_BYTES
                found = (sums + r * UNIT * FLOAT_BYTES, operand.factors[row + r], to, num_vectors)
                finish_gated(found, columns_at, kind)
            row += done
