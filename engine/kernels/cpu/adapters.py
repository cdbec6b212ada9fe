"""LoRA adapters inside the loop over layers: y += b (a x), for the rows that use an adapter.

A thread does its own rows, between two barriers that the loop has anyway: `shrink` computes a x where the rows of a
product are prepared, `expand` adds b (a x) where its result is read next. Only the end of the layers has a barrier of
its own, as other ranks may still add to their rows. Neighbouring rows of one adapter are multiplied together. Sums are
always added in the same order, so a row's result does not depend on its batch. Matrices are packed in panels of 16
outputs, [inputs][16], as `tiles.py` reads them.
"""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.arguments import Address, Floats, Int64s, Matrix, Range
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, PANEL
from engine.kernels.cpu.products.panels import multiply_panel, multiply_some
from engine.kernels.cpu.products.tiles import TileProduct
from engine.kernels.cpu.rows import Norm, norm_row
from engine.kernels.cpu.vectors import address, scale_row

QKV_SITE, OUTPUT_SITE, GATE_UP_SITE, DOWN_SITE = range(4)
RECURRENT_IN_SITE, RECURRENT_OUT_SITE, INPUT_GATE_SITE, INPUT_PROJECTION_SITE = range(4, 8)
"""The products of a layer that an adapter may change."""
NUM_SITES = 8
_MAX_MODULES = 4
"""Modules whose matrices are one: the input projections of a delta net, or queries, keys and values."""
_PANEL_BYTES = PANEL * FLOAT_BYTES


def shrunk_width(highest_rank: int) -> int:
    """Columns of StepAdapters.shrunk: numbers of a x of all modules of a site."""
    return _MAX_MODULES * ((highest_rank + PANEL - 1) // PANEL * PANEL)


class PackedPiece(NamedTuple):
    """A ModulePiece (engine/models/adapters.py) as it is packed: a row of AdapterPieces.pieces."""

    a_at: int  # index of a's first number; a: [panels of the rank, inputs, 16]
    b_at: int  # b: [panels, rank, 16]
    rank: int
    column: int  # of the product, where the first panel is added
    step: int  # columns from panel to panel: 16, or 32 where gates and ups alternate
    outputs: int


class AdapterPieces(NamedTuple):
    """The packed adapters of a model, the same in every step."""

    packed: Floats  # flat
    pieces: Int64s  # [num_pieces, 6]: see PackedPiece
    starts: Int64s  # [num_adapters, num_layers, NUM_SITES + 1]: the first piece of each site, and the end


class StepAdapters(NamedTuple):
    """The adapters of a step. Threads of all ranks share all arrays but `tile`, each with its own rows. If no row uses
    an adapter, there are no runs, and the buffers are empty.
    """

    adapters: AdapterPieces
    runs: Int64s  # [num_runs, 3]: number of the adapter, first row, end row; in the order of rows
    normed: Floats  # [num_tokens, hidden]
    shrunk: Floats  # [num_tokens, shrunk_width]
    tile: Floats  # flat [MAX_PANEL_ROWS * 16]


@jit
def changes_site(step: StepAdapters, layer: int, site: int) -> bool:
    """True if an adapter of the step changes the product."""
    for run in range(len(step.runs)):
        starts = step.adapters.starts[step.runs[run, 0], layer]
        if starts[site] < starts[site + 1]:
            return True
    return False


@jit
def norm_and_shrink(step: StepAdapters, layer: int, site: int, x: Floats, norm: Norm, own: Range) -> None:
    """Like `shrink`, of rows after a norm."""
    width = x.shape[1]
    for run in range(len(step.runs)):
        for r in range(max(own.first, step.runs[run, 1]), min(own.end, step.runs[run, 2])):
            out, divisor = address(step.normed) + r * width * FLOAT_BYTES, norm_row(x[r], norm, step.normed[r])
            scale_row(out, width // PANEL, np.float32(1.0) / divisor, out)
    shrink(step, layer, site, step.normed, width, own)


@jit
def shrink(step: StepAdapters, layer: int, site: int, x: Floats, depth: int, own: Range) -> None:
    """Compute a x of the rows of x [num_tokens, depth or more] in the range that use an adapter."""
    packed, pieces, starts = step.adapters.packed, step.adapters.pieces, step.adapters.starts
    x_step, shrunk_step = x.shape[1] * FLOAT_BYTES, step.shrunk.shape[1] * FLOAT_BYTES
    for run in range(len(step.runs)):
        adapter, first, end = step.runs[run]
        first, end = max(first, own.first), min(end, own.end)
        if first >= end:
            continue
        rows = Matrix(address(x) + first * x_step, x_step)
        out = address(step.shrunk) + first * shrunk_step
        for piece in range(starts[adapter, layer, site], starts[adapter, layer, site + 1]):
            a_at, _, rank, _, _, _ = pieces[piece]
            for panel in range((rank + PANEL - 1) // PANEL):
                a = address(packed) + (a_at + panel * depth * PANEL) * FLOAT_BYTES
                multiply_panel(TileProduct(rows, Matrix(a, 0), Matrix(out, shrunk_step)), depth, end - first, packed[0])
                out += _PANEL_BYTES


@jit
def expand(step: StepAdapters, layer: int, site: int, y: Floats, own: Range) -> None:
    """Add b (a x) to the rows of y [num_tokens, columns] in the range, after `shrink`."""
    packed, pieces, starts = step.adapters.packed, step.adapters.pieces, step.adapters.starts
    shrunk_step = step.shrunk.shape[1] * FLOAT_BYTES
    for run in range(len(step.runs)):
        adapter, first, end = step.runs[run]
        first, end = max(first, own.first), min(end, own.end)
        if first >= end:
            continue
        shrunk = address(step.shrunk) + first * shrunk_step
        for piece in range(starts[adapter, layer, site], starts[adapter, layer, site + 1]):
            _, b_at, rank, column, column_step, outputs = pieces[piece]
            for panel in range((outputs + PANEL - 1) // PANEL):
                b, at = address(packed) + (b_at + panel * rank * PANEL) * FLOAT_BYTES, column + panel * column_step
                columns = Range(at, at + min(PANEL, outputs - panel * PANEL))
                _add_panel(step, y, Range(first, end), columns, rank, shrunk, b)
            shrunk += (rank + PANEL - 1) // PANEL * _PANEL_BYTES


@jit
def _add_panel(
    step: StepAdapters, y: Floats, rows: Range, columns: Range, rank: int, shrunk: Address, b: Address
) -> None:
    """Add up to 16 columns of b (a x) to the rows."""
    shrunk_step, tile = step.shrunk.shape[1] * FLOAT_BYTES, step.tile
    row = rows.first
    while row < rows.end:
        left = Matrix(shrunk + (row - rows.first) * shrunk_step, shrunk_step)
        matrices = TileProduct(left, Matrix(b, 0), Matrix(address(tile), _PANEL_BYTES))
        count = multiply_some(matrices, rank, rows.end - row, step.adapters.packed[0])
        for r in range(count):
            if columns.end == columns.first + PANEL:  # a loop that the compiler can unroll
                for i in range(PANEL):
                    y[row + r, columns.first + i] += tile[r * PANEL + i]
            else:
                for i in range(columns.end - columns.first):
                    y[row + r, columns.first + i] += tile[r * PANEL + i]
        row += count
