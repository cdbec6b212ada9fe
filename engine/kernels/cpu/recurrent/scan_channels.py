"""The channels of Mamba 1: see engine/models/recurrent/channel_scan.py.

Steps, keys and queries depend on all channels, so a layer has four stages: convolutions, a product from all values of a
token to its low-rank step, key and query (its *inner row*), a product from low-rank steps to the steps of channels, and
the scan of each channel. Lanes are channels, so any number of keys will do. Both products are in fp32.
"""

import numpy as np

from engine.kernels.cpu.arguments import Address, Floats, Matrix, Range
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES, PANEL, VECTOR_BYTES
from engine.kernels.cpu.products.panels import call_panel_product
from engine.kernels.cpu.products.tiles import TileProduct
from engine.kernels.cpu.recurrent.channel_vectors import ChannelColumns, ChannelToken, scan_row, soften_row
from engine.kernels.cpu.recurrent.recurrent_arguments import MixPart, Recurrent, StateSteps
from engine.kernels.cpu.recurrent.recurrent_vectors import copy_vectors
from engine.kernels.cpu.recurrent.states import MixedRows, Tokens, numbers_from
from engine.kernels.cpu.threads.barrier import share_of
from engine.kernels.cpu.vectors import address, read_float, write_float

_ONE = np.float32(1.0)


@jit
def project_values(
    recurrent: Recurrent, layer: int, num_rows: int, part: MixPart, rows: MixedRows, inner: Matrix
) -> None:
    """Compute some columns of all inner rows: [low-rank step, key, query]."""
    channels, width = recurrent.taps.shape[2], recurrent.value_panels.shape[1]
    panel_numbers = channels * PANEL
    first, end = share_of(width // panel_numbers, part.number, part.num_parts)
    values, panels = Matrix(rows.projected, rows.step), address(recurrent.value_panels) + layer * width * FLOAT_BYTES
    for panel in range(first, end):
        weights = Matrix(panels + panel * panel_numbers * FLOAT_BYTES, 0)
        product = TileProduct(values, weights, Matrix(inner.address + panel * VECTOR_BYTES, inner.step))
        call_panel_product(recurrent.multiply, (product, channels, num_rows))


@jit
def project_steps(
    recurrent: Recurrent, layer: int, num_rows: int, part: MixPart, rows: MixedRows, inner: Matrix
) -> None:
    """Compute the steps of some channels in all rows, to where the results will be, and norm the keys and queries of
    some rows. The norm's weights of low-rank steps are in the matrix.
    """
    channels, rank, has_norms = recurrent.taps.shape[2], recurrent.step_rank, recurrent.norms.shape[1] > 0
    if has_norms:
        _norm_keys(recurrent, layer, share_of(num_rows, part.number, part.num_parts), inner)
    first, end = share_of(channels // PANEL, part.number, part.num_parts)
    if end == first:
        return
    panels = address(recurrent.step_panels) + layer * channels * rank * FLOAT_BYTES
    for panel in range(first, end):
        weights = Matrix(panels + panel * rank * VECTOR_BYTES, 0)
        product = TileProduct(inner, weights, Matrix(rows.out + panel * VECTOR_BYTES, rows.out_step))
        call_panel_product(recurrent.multiply, (product, rank, num_rows))
    biases = address(recurrent.rate_biases) + layer * channels * FLOAT_BYTES + first * VECTOR_BYTES
    for row in range(num_rows):
        factor = _norm_factor(inner.address + row * inner.step, rank, recurrent.eps) if has_norms else _ONE
        soften_row(rows.out + row * rows.out_step + first * VECTOR_BYTES, factor, biases, end - first)


@jit
def _norm_keys(recurrent: Recurrent, layer: int, own: Range, inner: Matrix) -> None:
    key_dim, weights = recurrent.key_dim, recurrent.norms[layer]
    for row in range(own.first, own.end):
        keys = inner.address + row * inner.step + recurrent.step_rank * FLOAT_BYTES
        for first in (0, key_dim):
            at = keys + first * FLOAT_BYTES
            factor = _norm_factor(at, key_dim, recurrent.eps)
            for key in range(key_dim):
                number = at + key * FLOAT_BYTES
                write_float(number, read_float(number) * factor * weights[first + key])


@jit
def _norm_factor(row: Address, count: int, eps: np.float32) -> np.float32:
    """1 / the root of the mean square of some numbers."""
    total = np.float32(0.0)
    for i in range(count):
        number = read_float(row + i * FLOAT_BYTES)
        total += number * number
    return _ONE / np.sqrt(total / np.float32(count) + eps)


@jit
def scan_channels(
    recurrent: Recurrent,
    layer: int,
    steps: StateSteps,
    tokens: Tokens,
    own: Range,
    state: Floats,
    rows: MixedRows,
    inner: Matrix,
) -> None:
    """Some channels, of which values are convolved and steps computed. state: scratch."""
    if tokens.is_first:
        state[:] = np.float32(0.0)
    else:
        _copy_columns(recurrent, layer, tokens.seq, steps, own, address(state), False)
    _pass_tokens(recurrent, layer, Range(tokens.first, tokens.kept_end), own, address(state), rows, inner)
    if tokens.kept_end > tokens.first or tokens.is_first:
        _copy_columns(recurrent, layer, tokens.seq, steps, own, address(state), True)
    _pass_tokens(recurrent, layer, Range(tokens.kept_end, tokens.end), own, address(state), rows, inner)


@jit
def _pass_tokens(
    recurrent: Recurrent, layer: int, passing: Range, own: Range, state: Address, rows: MixedRows, inner: Matrix
) -> None:
    channels, key_dim = recurrent.taps.shape[2], recurrent.key_dim
    first = own.first * FLOAT_BYTES
    rates = address(recurrent.rates) + layer * channels * key_dim * FLOAT_BYTES + first * key_dim
    skips = address(recurrent.skips) + layer * channels * FLOAT_BYTES + first
    columns = ChannelColumns(state, rates, skips, key_dim)
    for token in range(passing.first, passing.end):
        values, out = rows.projected + token * rows.step + first, rows.out + token * rows.out_step + first
        keys = inner.address + token * inner.step + recurrent.step_rank * FLOAT_BYTES
        gates, queries = values + channels * FLOAT_BYTES, keys + key_dim * FLOAT_BYTES
        scan_row(columns, ChannelToken(out, values, gates, keys, queries, out), (own.end - own.first) // LANES)


@jit
def _copy_columns(
    recurrent: Recurrent, layer: int, seq: int, steps: StateSteps, own: Range, columns: Address, writes: bool
) -> None:
    """Copy some channels of a state to vectors, those of 16 channels behind each other, or, if `writes`, back."""
    channels, width, step = recurrent.taps.shape[2], own.end - own.first, recurrent.key_dim * VECTOR_BYTES
    matrix_at = (recurrent.taps.shape[1] - 1) * channels + own.first
    for key in range(recurrent.key_dim):
        done = 0
        while done < width:
            at, count = numbers_from(recurrent.places, layer, seq, steps, matrix_at + key * channels + done)
            num_vectors = min(count, width - done) // LANES
            target = columns + done // LANES * step + key * VECTOR_BYTES
            if writes:
                copy_vectors(target, step, num_vectors, at, VECTOR_BYTES)
            else:
                copy_vectors(at, VECTOR_BYTES, num_vectors, target, step)
            done += num_vectors * LANES
