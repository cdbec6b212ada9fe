"""Matrix products over packed weights, each followed by a store, an addition to the residual, or a gate.

Columns are processed in units of 32, rows in tiles. The weights of a unit are read from memory once and stay in the
cache while all rows are multiplied. Sums are exact integers in int8, and else always added in the same order, so a
row's result does not depend on its batch.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types

from engine.kernels.cpu.arguments import (
    DEPTH,
    NUMBERS,
    Address,
    Element,
    Floats,
    Matrix,
    Operand,
    Part,
    ProductCode,
    Range,
    Weights,
)
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.compilation.parts import select_by_dtype
from engine.kernels.cpu.compilation.pieces import Piece, caller, element_of
from engine.kernels.cpu.machine import (
    AMX_TILE_ROW_BYTES,
    BLOCK_HEAD_BYTES,
    FLOAT_BYTES,
    IN_BF16,
    IN_FP32,
    NUM_KINDS,
    PANEL,
    SLOT_BYTES,
    STEPS,
    TILE_ROWS,
    UNIT,
    VECTOR_BYTES,
    widens_ahead,
)
from engine.kernels.cpu.products.amx import (
    AmxProduct,
    Prefetch,
    configure_amx,
    fits_amx,
    multiply_and_finish,
    release_amx,
)
from engine.kernels.cpu.products.finish import ADD, GATE, STORE, ColumnData, SumRows, SumTile, finish_rows
from engine.kernels.cpu.products.nibble_numbers import Numbers, bytes_per_input, panel_bytes, scales_bytes
from engine.kernels.cpu.products.operand_rows import put_values
from engine.kernels.cpu.products.packing import operand_dtypes
from engine.kernels.cpu.products.row_tiles import multiply_rows
from engine.kernels.cpu.products.steps import stepped_panel_bytes, unpack_unit
from engine.kernels.cpu.products.tiles import TileProduct, form_bytes, widen_panels
from engine.kernels.cpu.vectors import address, read_int64

_PREFETCH_MIN_TILES = 4
_MAX_AHEAD_BYTES = 2**18
"""The largest unit that is fetched while the unit before it is multiplied: both stay in a core's own cache."""
_AHEAD_IN_PANEL_BYTES = 2**12
_WIDE_MIN_ROWS, _UNPACKED_MIN_ROWS = 16, 17
"""Weights are not widened or unpacked ahead for fewer rows: it would take longer than it saves."""
_SUM_BYTES = UNIT * FLOAT_BYTES
_TILE_BYTES = TILE_ROWS * _SUM_BYTES
_FORM_BYTES = 2 * SLOT_BYTES

_bytes_per_input, _panel_bytes, _scales_bytes = jit(bytes_per_input), jit(panel_bytes), jit(scales_bytes)
_form_bytes, _stepped_panel_bytes = jit(form_bytes), jit(stepped_panel_bytes)
_FP32, _BF16, _INT8 = np.float32(0), np.uint32(0), np.int8(0)
"""Any elements of units in these forms."""


class Target(NamedTuple):
    """The destination of a product. mode: finish.STORE, ADD or GATE."""

    out: Floats  # [rows, columns], or [rows, columns / 2] with GATE
    mode: int


@jit
def begin_products(operand: Operand) -> None:
    """Configure AMX. Each thread calls this function before its products."""
    if len(operand.amx):
        configure_amx(operand.amx)


@jit
def end_products(operand: Operand) -> None:
    """Release AMX. Each thread calls this function after its products."""
    if len(operand.amx):
        release_amx()


class _Rows(NamedTuple):
    """Rows of the operand and the target, as addresses and steps in bytes."""

    a: Address
    a_step: int
    factors: Address
    sums: Address
    out: Address
    out_step: int
    num_rows: int
    wide: Address  # see Operand
    num_wide: int


class _Columns(NamedTuple):
    """Columns of a matrix, as addresses."""

    packed: Address
    unit_bytes: int
    group: int
    numbers: int
    offsets: Address
    scales: Address
    biases: Address
    num_columns: int
    forms: Address  # `Weights.units` from the first of the matrix on


@jit
def product(operand: Operand, weights: Weights, matrix: int, target: Target, part: Part) -> None:
    """Compute one thread's part of a product's columns.

    STORE: out = operand @ matrix + bias. ADD: out += operand @ matrix + bias. GATE: out = silu(gate) * up, for a matrix
    in which panels of gate columns and of up columns alternate.
    """
    rows, columns = _rows(operand, weights, matrix, target), _columns(operand, weights, matrix)
    num_units = (columns.num_columns + UNIT - 1) // UNIT
    units = Range(num_units * part.number // part.num_parts, num_units * (part.number + 1) // part.num_parts)
    multiply_at = operand.code.multiply[weights.matrices[matrix, NUMBERS]]
    _multiply(multiply_at, (rows, columns, target.mode, units, len(operand.amx) > 0))


@Piece
def multiply(kind: Any, rows: _Rows, columns: _Columns, mode: int, units: Range, has_amx: bool) -> None:
    """`product` of these units of columns. kind: of the weights."""
    element = element_of(kind)
    if has_amx and fits_amx(rows.num_rows, rows.a_step, element):
        _amx_product(rows, columns, mode, units, element)
    else:
        vector_product(rows, columns, mode, units, element)


_multiply = caller(multiply)


def product_code(weights: Weights) -> ProductCode:
    """The code of products with matrices of these kinds, which is compiled or read from disk."""
    packed, (operand, _) = weights.packed.dtype, operand_dtypes(weights)
    multiply_at = np.zeros(NUM_KINDS, np.int64)
    for numbers in np.flatnonzero(np.bincount(weights.matrices[:, NUMBERS])).tolist():
        multiply_at[numbers] = multiply.address_for(Numbers(numbers) if packed == np.uint8 else packed)
    return ProductCode(multiply_at, put_values.address_for(operand), packed.itemsize, np.dtype(operand).itemsize)


@jit
def _rows(operand: Operand, weights: Weights, matrix: int, target: Target) -> _Rows:
    out, step = target.out, weights.matrices[matrix, DEPTH] * operand.code.operand_bytes
    return _Rows(
        address(operand.a),
        step,
        address(operand.factors),
        address(operand.sums),
        address(out),
        out.shape[1] * FLOAT_BYTES,
        len(out),
        address(operand.wide),
        len(operand.wide),
    )


@jit
def _columns(operand: Operand, weights: Weights, matrix: int) -> _Columns:
    weight_at, column_at, depth, count, group, _, numbers = weights.matrices[matrix]
    width, offset = operand.code.weight_bytes, column_at * FLOAT_BYTES
    if numbers == STEPS:
        unit_bytes = 2 * _stepped_panel_bytes(depth)
    elif group:
        num_groups = depth // (group + BLOCK_HEAD_BYTES)
        unit_bytes = 2 * _panel_bytes(num_groups, group * _bytes_per_input(numbers), _scales_bytes(numbers))
    else:
        unit_bytes = UNIT * depth * width
    return _Columns(
        address(weights.packed) + weight_at * width,
        unit_bytes,
        group,
        numbers,
        address(weights.offsets) + offset,
        address(weights.scales) + offset,
        address(weights.biases) + offset,
        count,
        address(weights.units) + column_at // UNIT * _FORM_BYTES,
    )


def vector_product(rows: _Rows, columns: _Columns, mode: int, units: Range, element: Element) -> None:
    """A product without AMX. `element`: any element of the weights."""
    raise NotImplementedError


def _product_as_stored(rows: _Rows, columns: _Columns, mode: int, units: Range, element: Element) -> None:
    panel = columns.unit_bytes // 2
    ahead = _bytes_ahead(columns.unit_bytes)
    for unit in range(units.first, units.end):
        b = Matrix(columns.packed + unit * columns.unit_bytes, panel)
        _multiply_unit(rows, columns, mode, unit, b, ahead, element)


def _product_widened(rows: _Rows, columns: _Columns, mode: int, units: Range, element: Element) -> None:
    """With many rows, the weights of a unit are widened to fp32 once."""
    depth = rows.a_step // FLOAT_BYTES
    if rows.num_rows < _WIDE_MIN_ROWS or rows.num_wide < depth * UNIT:
        _as_stored(rows, columns, mode, units, element)
        return
    b = Matrix(rows.wide, depth * PANEL * FLOAT_BYTES)
    for unit in range(units.first, units.end):
        widen_panels(columns.packed + unit * columns.unit_bytes, columns.unit_bytes, 0, b.address, element)
        _multiply_unit(rows, columns, mode, unit, b, 0, _FP32)


def _product_of_steps(rows: _Rows, columns: _Columns, mode: int, units: Range, element: Element) -> None:
    """The weights of a unit are unpacked once for all rows. In few rows each tile unpacks them in registers."""
    if rows.num_rows < _UNPACKED_MIN_ROWS:
        _as_stored(rows, columns, mode, units, element)
        return
    for unit in range(units.first, units.end):
        at = columns.packed + unit * columns.unit_bytes
        b = unpack_unit(at, columns.unit_bytes, rows.wide)
        _multiply_unit(rows, columns, mode, unit, b, at + columns.unit_bytes - b.address, _INT8)


def _product_of_forms(rows: _Rows, columns: _Columns, mode: int, units: Range, element: Element) -> None:
    """Each unit has a form of its own."""
    depth = rows.a_step // FLOAT_BYTES
    for unit in range(units.first, units.end):
        at, form = _unit(columns, unit)
        panel = _form_bytes(depth, form)
        b, ahead, own = Matrix(at, panel), _bytes_ahead(2 * panel), _in_groups(columns, form)
        if form == IN_FP32:
            _multiply_unit(rows, own, mode, unit, b, ahead, _FP32)
        elif form == IN_BF16:
            _multiply_unit(rows, own, mode, unit, b, ahead, _BF16)
        else:
            _multiply_unit(rows, own, mode, unit, b, ahead, element)


def _product_of_wide_forms(rows: _Rows, columns: _Columns, mode: int, units: Range, element: Element) -> None:
    """With many rows, the weights of a unit are widened to fp32 once."""
    depth = rows.a_step // FLOAT_BYTES
    if rows.num_rows < _WIDE_MIN_ROWS or rows.num_wide < depth * UNIT:
        _of_forms(rows, columns, mode, units, element)
        return
    b = Matrix(rows.wide, depth * PANEL * FLOAT_BYTES)
    for unit in range(units.first, units.end):
        at, form = _unit(columns, unit)
        if form == IN_FP32:
            _multiply_unit(rows, columns, mode, unit, Matrix(at, b.step), 0, _FP32)
            continue
        if form == IN_BF16:
            widen_panels(at, 2 * _form_bytes(depth, form), 0, b.address, _BF16)
        else:
            _widen_groups(at, depth, form, b, element)
        _multiply_unit(rows, columns, mode, unit, b, 0, _FP32)


@jit
def _unit(columns: _Columns, unit: int) -> tuple[Address, int]:
    """Where a unit of a model in fp8 begins, and its form."""
    at = columns.forms + unit * _FORM_BYTES
    return columns.packed + read_int64(at), read_int64(at + SLOT_BYTES)


@jit
def _widen_groups(at: Address, depth: int, group: int, out: Matrix, element: Element) -> None:
    """Convert the panels of a unit in fp8."""
    num_groups, panel = (depth + group - 1) // group, _form_bytes(depth, group)
    for number in range(2):
        scales_at, out_at = at + number * panel, out.address + number * out.step
        weights_at = scales_at + num_groups * VECTOR_BYTES
        for first in range(0, depth, group):
            count = min(group, depth - first)
            target = out_at + first * VECTOR_BYTES
            widen_panels(weights_at + first * PANEL, count * PANEL, scales_at, target, element)
            scales_at += VECTOR_BYTES


@jit
def _bytes_ahead(unit_bytes: int) -> int:
    """How far ahead weights are prefetched."""
    return unit_bytes if unit_bytes <= _MAX_AHEAD_BYTES else _AHEAD_IN_PANEL_BYTES


@jit
def _in_groups(columns: _Columns, group: int) -> _Columns:
    """Columns in which so many inputs share a scale."""
    packed, unit_bytes, _, numbers, offsets, scales, biases, count, forms = columns
    return _Columns(packed, unit_bytes, group, numbers, offsets, scales, biases, count, forms)


_as_stored, _of_forms = jit(_product_as_stored), jit(_product_of_forms)
_WIDENED: tuple[object, ...] = (types.uint16, types.int16) if widens_ahead() else ()
_IN_FP8 = _product_of_wide_forms if widens_ahead() else _product_of_forms
_PRODUCTS = dict.fromkeys(_WIDENED, _product_widened)
_PRODUCTS[types.boolean] = _IN_FP8
_PRODUCTS[types.int64] = _product_of_steps
select_by_dtype(vector_product, _PRODUCTS, _product_as_stored)


@jit
def _multiply_unit(
    rows: _Rows, columns: _Columns, mode: int, unit: int, b: Matrix, ahead: int, element: Element
) -> None:
    """Multiply all rows with the weights `b` of a unit, and finish the results. `element`: any element of `b`."""
    sums, row = Matrix(rows.sums, _SUM_BYTES), 0
    while row < rows.num_rows:
        matrices = TileProduct(Matrix(rows.a + row * rows.a_step, rows.a_step), b, sums)
        left = Range(row, rows.num_rows)
        count = multiply_rows(matrices, columns.group, left, ahead, element)
        num_rows = min(count, rows.num_rows - row)
        _finish(_tile(rows, columns, rows.sums, row, num_rows, unit, mode), mode, element)
        row += count


@jit
def _amx_product(rows: _Rows, columns: _Columns, mode: int, units: Range, element: Element) -> None:
    """The sums of a tile are finished while the next tile is multiplied. Two buffers of sums alternate."""
    depth, panel = rows.a_step // AMX_TILE_ROW_BYTES, columns.unit_bytes // 2
    num_tiles = (rows.num_rows + TILE_ROWS - 1) // TILE_ROWS
    # With few tiles, the CPU's own prefetcher fetches the next weights in time.
    lines = UNIT // num_tiles if num_tiles >= _PREFETCH_MIN_TILES else 0
    previous, buffer = _tile(rows, columns, rows.sums, 0, 0, units.first, mode), 0
    for unit in range(units.first, units.end):
        at, following = columns.packed + unit * columns.unit_bytes, columns.packed + (unit + 1) * columns.unit_bytes
        b = unpack_unit(at, columns.unit_bytes, rows.wide) if columns.numbers == STEPS else Matrix(at, panel)
        for row in range(0, rows.num_rows, TILE_ROWS):
            sums = rows.sums + buffer * _TILE_BYTES
            a = Matrix(rows.a + row * rows.a_step, rows.a_step)
            matrices = AmxProduct(a, b, Matrix(sums, _SUM_BYTES), depth)
            ahead = Prefetch(following + row // TILE_ROWS * lines * rows.a_step, lines)
            _multiply_and_finish(matrices, rows.num_rows - row, previous, mode, ahead, element)
            num_rows = min(TILE_ROWS, rows.num_rows - row)
            previous = _tile(rows, columns, sums, row, num_rows, unit, mode)
            buffer = 1 - buffer
    _finish(previous, mode, element)


@jit
def _multiply_and_finish(
    matrices: AmxProduct, max_rows: int, previous: SumTile, mode: int, ahead: Prefetch, element: Element
) -> None:
    if max_rows > TILE_ROWS // 2:
        if mode == GATE:
            multiply_and_finish(matrices, 2, previous, GATE, ahead, element)
        elif mode == ADD:
            multiply_and_finish(matrices, 2, previous, ADD, ahead, element)
        else:
            multiply_and_finish(matrices, 2, previous, STORE, ahead, element)
    elif mode == GATE:
        multiply_and_finish(matrices, 1, previous, GATE, ahead, element)
    elif mode == ADD:
        multiply_and_finish(matrices, 1, previous, ADD, ahead, element)
    else:
        multiply_and_finish(matrices, 1, previous, STORE, ahead, element)


@jit
def _tile(rows: _Rows, columns: _Columns, sums: Address, first: int, num_rows: int, unit: int, mode: int) -> SumTile:
    """The rows from number `first` on and the columns of a unit, whose sums are at the address `sums`."""
    out = rows.out + first * rows.out_step + unit * (_SUM_BYTES // 2 if mode == GATE else _SUM_BYTES)
    offset = unit * _SUM_BYTES
    column_data = ColumnData(columns.offsets + offset, columns.scales + offset, columns.biases + offset)
    sum_rows = SumRows(sums, rows.factors + first * FLOAT_BYTES, out, rows.out_step, num_rows)
    return SumTile(sum_rows, column_data, (columns.num_columns - unit * UNIT) // PANEL)


@jit
def _finish(tile: SumTile, mode: int, element: Element) -> None:
    if mode == GATE:
        finish_rows(tile, GATE, element)
    elif mode == ADD:
        finish_rows(tile, ADD, element)
    else:
        finish_rows(tile, STORE, element)
