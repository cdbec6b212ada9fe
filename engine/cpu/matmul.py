"""Matrix products over packed weights, each with what follows it: store, add to the residual, or gate.

Columns are worked on in units of 32, rows in tiles; a unit's weights come from memory once and stay in the cache while
the rows pass by. In int8 sums are exact integers and in fp32 always added in the same order, so a row's result does not
depend on the batch it is in.
"""

from typing import Any, NamedTuple

from engine.cpu.amx import configure_amx, multiply_and_finish, release_amx
from engine.cpu.finish import ADD, GATE, STORE, finish_rows
from engine.cpu.jit import jit
from engine.cpu.tiles import PANEL, multiply_tile
from engine.cpu.vectors import FLOAT_BYTES, address

UNIT = 32
"""Columns of a unit: two panels."""
TILE_ROWS = 32
"""Most rows of a tile; rows beyond the last are read, and their results dropped."""
_AMX_MIN_ROWS = 5
_AMX_DEPTH = 64
_FETCH_MIN_TILES = 4
_SUM_BYTES = UNIT * FLOAT_BYTES
_TILE_BYTES = TILE_ROWS * _SUM_BYTES


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
    sums: Any  # a thread's own, [2 * TILE_ROWS, UNIT], int32 or fp32
    amx: Any  # 64 bytes that configure the tile registers; empty: no AMX, as always in fp32


class Target(NamedTuple):
    """Where a product goes, and how: finish.STORE, ADD or GATE."""

    out: Any  # [rows, columns], or [rows, columns / 2] if gated
    how: int


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


class _Rows(NamedTuple):
    """A product in addresses, and steps in bytes: arrays would be counted references in the innermost loops."""

    a: int
    a_step: int
    factors: int
    sums: int
    out: int
    out_step: int
    num_rows: int


class _Columns(NamedTuple):
    """A matrix, likewise."""

    packed: int
    unit_bytes: int
    offsets: int
    scales: int
    biases: int
    num_columns: int


@jit
def product(operand: Any, weights: Any, matrix: Any, target: Any, share: Any) -> None:
    """out = operand @ matrix + bias, out += that, or out = silu(gate) * up for a matrix whose panels of 16 columns are
    gate and up by turns; see Target.

    `share` (index, count) says which columns are this thread's.
    """
    rows, columns = _rows(operand, weights, matrix, target), _columns(weights, matrix)
    num_units = (columns.num_columns + UNIT - 1) // UNIT
    units = (num_units * share[0] // share[1], num_units * (share[0] + 1) // share[1])
    if len(operand.amx) and rows.num_rows >= _AMX_MIN_ROWS:
        _amx_product(rows, columns, target.how, units, operand.sums[0])
    else:
        _vector_product(rows, columns, target.how, units, operand.sums[0])


@jit
def _rows(operand: Any, weights: Any, matrix: Any, target: Any) -> Any:
    step = weights.matrices[matrix, 2] * operand.a.itemsize
    out, sums = target.out, address(operand.sums)
    return _Rows(
        address(operand.a), step, address(operand.factors), sums, address(out), out.shape[1] * FLOAT_BYTES, len(out)
    )


@jit
def _columns(weights: Any, matrix: Any) -> Any:
    weight_at, column_at, depth, count = weights.matrices[matrix]
    width, skipped = weights.packed.itemsize, column_at * FLOAT_BYTES
    return _Columns(
        address(weights.packed) + weight_at * width,
        UNIT * depth * width,
        address(weights.offsets) + skipped,
        address(weights.scales) + skipped,
        address(weights.biases) + skipped,
        count,
    )


@jit
def _vector_product(rows: Any, columns: Any, how: Any, units: Any, kind: Any) -> None:
    panel = columns.unit_bytes // 2
    sums = (rows.sums, _SUM_BYTES)
    for unit in range(units[0], units[1]):
        b = (columns.packed + unit * columns.unit_bytes, panel)
        row = 0
        while row < rows.num_rows:
            places = ((rows.a + row * rows.a_step, rows.a_step), b, sums)
            done = _sum_tile(places, rows.a_step // 4, rows.num_rows - row, kind)
            _finish(_tile(rows, columns, (rows.sums, row, min(done, rows.num_rows - row)), unit, how), how, kind)
            row += done


@jit
def _sum_tile(places: Any, depth: Any, rows: Any, kind: Any) -> Any:
    """Multiply at most `rows` rows; returns how many. `depth` counts 4 bytes of a row: one fp32, or 4 int8."""
    if rows >= 9:
        multiply_tile(places, depth, 12, 2, kind)
        return 12
    if rows >= 5:
        multiply_tile(places, depth, 8, 2, kind)
        return 8
    if rows >= 3:
        multiply_tile(places, depth, 4, 2, kind)
        return 4
    if rows == 2:
        multiply_tile(places, depth, 2, 2, kind)
        return 2
    multiply_tile(places, depth, 1, 2, kind)
    return 1


@jit
def _amx_product(rows: Any, columns: Any, how: Any, units: Any, kind: Any) -> None:
    """The sums of a tile are ended while the next is multiplied; they take turns in two places."""
    depth, panel = rows.a_step // _AMX_DEPTH, columns.unit_bytes // 2
    num_tiles = (rows.num_rows + TILE_ROWS - 1) // TILE_ROWS
    # A single tile leaves the next weights to the CPU's own prefetching.
    lines = UNIT // num_tiles if num_tiles >= _FETCH_MIN_TILES else 0
    before, turn = _tile(rows, columns, (rows.sums, 0, 0), units[0], how), 0
    for unit in range(units[0], units[1]):
        b = (columns.packed + unit * columns.unit_bytes, panel)
        for row in range(0, rows.num_rows, TILE_ROWS):
            sums = rows.sums + turn * _TILE_BYTES
            places = ((rows.a + row * rows.a_step, rows.a_step), b, (sums, _SUM_BYTES), depth)
            ahead = (b[0] + columns.unit_bytes + row // TILE_ROWS * lines * rows.a_step, lines)
            _multiply_and_finish(places, rows.num_rows - row, before, how, ahead)
            before = _tile(rows, columns, (sums, row, min(TILE_ROWS, rows.num_rows - row)), unit, how)
            turn = 1 - turn
    _finish(before, how, kind)


@jit
def _multiply_and_finish(places: Any, rows: Any, before: Any, how: Any, ahead: Any) -> None:
    if rows > TILE_ROWS // 2:
        if how == GATE:
            multiply_and_finish(places, 2, before, GATE, ahead)
        elif how == ADD:
            multiply_and_finish(places, 2, before, ADD, ahead)
        else:
            multiply_and_finish(places, 2, before, STORE, ahead)
    elif how == GATE:
        multiply_and_finish(places, 1, before, GATE, ahead)
    elif how == ADD:
        multiply_and_finish(places, 1, before, ADD, ahead)
    else:
        multiply_and_finish(places, 1, before, STORE, ahead)


@jit
def _tile(rows: Any, columns: Any, span: Any, unit: Any, how: Any) -> Any:
    """What finish.Finish calls a tile; span: (address of the sums, first row, how many)."""
    sums, row, count = span
    out = rows.out + row * rows.out_step + unit * (_SUM_BYTES // 2 if how == GATE else _SUM_BYTES)
    skipped = unit * _SUM_BYTES
    of_columns = (columns.offsets + skipped, columns.scales + skipped, columns.biases + skipped)
    of_rows = (sums, rows.factors + row * FLOAT_BYTES, out, rows.out_step, count)
    return of_rows, of_columns, (columns.num_columns - unit * UNIT) // PANEL


@jit
def _finish(tile: Any, how: Any, kind: Any) -> None:
    if how == GATE:
        finish_rows(tile, GATE, kind)
    elif how == ADD:
        finish_rows(tile, ADD, kind)
    else:
        finish_rows(tile, STORE, kind)
