"""Products with a single panel of 16 columns: of adapters, routers, latents and Mamba 1."""

from typing import Any

from engine.kernels.cpu.arguments import Element, Matrix
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.compilation.pieces import Piece, caller, element_of
from engine.kernels.cpu.products.tiles import TileProduct, multiply_tile

MAX_PANEL_ROWS = 6
"""Rows that `multiply_some` multiplies at most."""


@jit
def multiply_panel(matrices: TileProduct, depth: int, num_rows: int, element: Element) -> None:
    """Multiply all rows with one panel."""
    a, b, out = matrices
    row = 0
    while row < num_rows:
        some = TileProduct(Matrix(a.address + row * a.step, a.step), b, Matrix(out.address + row * out.step, out.step))
        row += multiply_some(some, depth, num_rows - row, element)


@jit
def multiply_some(matrices: TileProduct, depth: int, max_rows: int, element: Element) -> int:
    """Multiply the largest tile that has rows only; returns its rows."""
    if max_rows >= MAX_PANEL_ROWS:
        multiply_tile(matrices, depth, 6, 1, element)
        return 6
    if max_rows >= 4:
        multiply_tile(matrices, depth, 4, 1, element)
        return 4
    if max_rows >= 2:
        multiply_tile(matrices, depth, 2, 1, element)
        return 2
    multiply_tile(matrices, depth, 1, 1, element)
    return 1


@Piece
def panel_product(kind: Any, matrices: TileProduct, depth: int, num_rows: int) -> None:
    """`multiply_panel`. kind: of the panel."""
    multiply_panel(matrices, depth, num_rows, element_of(kind))


call_panel_product = caller(panel_product)
