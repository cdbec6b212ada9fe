"""The heads of Mamba 2, for the tokens of one sequence: see engine/models/recurrent/scan.py.

Many heads share keys and queries, so all channels are convolved first, then each head passes by itself, and then whole
rows are gated and normed. A head's matrix is copied to where 32 of its columns stay in the L1 cache, as in
delta_heads.py.
"""

import numpy as np

from engine.kernels.cpu.arguments import Floats, Range
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES, VECTOR_BYTES
from engine.kernels.cpu.recurrent.recurrent_arguments import Recurrent, StateSteps
from engine.kernels.cpu.recurrent.recurrent_vectors import HeadMatrix, Scanned, gate_row, scan_columns
from engine.kernels.cpu.recurrent.states import (
    MixedRows,
    Tokens,
    convolve_tokens,
    copy_matrix,
    numbers_from,
    softplus,
)
from engine.kernels.cpu.vectors import address, read_float, scale_row, weigh_row, write_float

_ONE = np.float32(1.0)


@jit
def convolve_channels(
    recurrent: Recurrent, layer: int, steps: StateSteps, tokens: Tokens, own: Range, rows: MixedRows
) -> None:
    """SiLU of the convolution of some channels, in place. Rows are [gate of the result, values, keys, queries, steps of
    heads]; all but gates and steps are channels.
    """
    behind_gate = rows.projected + recurrent.rates.shape[1] * recurrent.value_dim * FLOAT_BYTES
    convolve_tokens(recurrent, layer, steps, tokens, own, MixedRows(behind_gate, rows.step, rows.out, rows.out_step))


@jit
def scan_head(
    recurrent: Recurrent, layer: int, steps: StateSteps, tokens: Tokens, head: int, matrix: Floats, rows: MixedRows
) -> None:
    """One head, whose channels are convolved. matrix: scratch."""
    decays = np.empty(tokens.end - tokens.first, np.float32)
    for token in range(tokens.first, tokens.end):
        decays[token - tokens.first] = _begin(recurrent, layer, head, token, rows)
    state_at = (recurrent.taps.shape[1] - 1) * recurrent.taps.shape[2] + head * len(matrix)
    if tokens.end - tokens.first == 1 and tokens.kept_end == tokens.end and not tokens.is_first:
        _step_in_place(
            recurrent, layer, steps, tokens, state_at, _scanned(recurrent, head, decays[0], tokens.first, rows)
        )
        return
    if tokens.is_first:
        matrix[:] = np.float32(0.0)
    else:
        copy_matrix(recurrent, layer, tokens.seq, steps, state_at, matrix, False)
    _pass_tokens(recurrent, Range(tokens.first, tokens.kept_end), tokens.first, head, decays, matrix, rows)
    if tokens.kept_end > tokens.first or tokens.is_first:
        copy_matrix(recurrent, layer, tokens.seq, steps, state_at, matrix, True)
    _pass_tokens(recurrent, Range(tokens.kept_end, tokens.end), tokens.first, head, decays, matrix, rows)


@jit
def _begin(recurrent: Recurrent, layer: int, head: int, token: int, rows: MixedRows) -> np.float32:
    """Write a token's step in a head in place of its projection, and what the token adds to its own result. Returns its
    decay.
    """
    width, scan = recurrent.value_dim, recurrent.scan
    inner, row = recurrent.rates.shape[1] * width, rows.projected + token * rows.step
    at = row + (inner + recurrent.taps.shape[2] + head) * FLOAT_BYTES
    step = softplus(read_float(at) * scan.step_factor + recurrent.rate_biases[layer, head])
    step = min(max(step, scan.least_step), scan.most_step)
    write_float(at, step)
    column = head * width * FLOAT_BYTES
    values, out = row + inner * FLOAT_BYTES + column, rows.out + token * rows.out_step + column
    scale_row(values, width // LANES, recurrent.skips[layer, head], out)
    return np.exp(recurrent.rates[layer, head] * step)


@jit
def _scanned(recurrent: Recurrent, head: int, decay: np.float32, token: int, rows: MixedRows) -> Scanned:
    """A token as a head's matrix sees it."""
    num_heads, key_dim, width = recurrent.rates.shape[1], recurrent.key_dim, recurrent.value_dim
    row, inner = rows.projected + token * rows.step, num_heads * width
    key = 2 * inner + head // (num_heads // recurrent.num_key_heads) * key_dim
    return Scanned(
        decay,
        read_float(row + (inner + recurrent.taps.shape[2] + head) * FLOAT_BYTES),
        row + key * FLOAT_BYTES,
        row + (key + recurrent.num_key_heads * key_dim) * FLOAT_BYTES,
        row + (inner + head * width) * FLOAT_BYTES,
        rows.out + token * rows.out_step + head * width * FLOAT_BYTES,
    )


@jit
def _from(token: Scanned, row: int, vector: int) -> Scanned:
    """A token as the matrix sees it from a row and a column of vectors on."""
    key, query, at = token.key + row * FLOAT_BYTES, token.query + row * FLOAT_BYTES, vector * VECTOR_BYTES
    return Scanned(token.decay, token.step, key, query, token.values + at, token.result + at)


@jit
def _pass_tokens(
    recurrent: Recurrent, own: Range, first: int, head: int, decays: Floats, matrix: Floats, rows: MixedRows
) -> None:
    """Let some tokens pass over the matrix of a head. first: the token of the first decay."""
    num_vectors, step = recurrent.value_dim // LANES, recurrent.key_dim * VECTOR_BYTES
    for vector in range(0, num_vectors, 2):
        columns = HeadMatrix(address(matrix) + vector * step, recurrent.key_dim, step)
        for token in range(own.first, own.end):
            scanned = _from(_scanned(recurrent, head, decays[token - first], token, rows), 0, vector)
            if vector + 2 <= num_vectors:
                scan_columns(columns, VECTOR_BYTES, scanned, 2)
            else:
                scan_columns(columns, VECTOR_BYTES, scanned, 1)


@jit
def _step_in_place(
    recurrent: Recurrent, layer: int, steps: StateSteps, tokens: Tokens, first: int, token: Scanned
) -> None:
    """Let one token pass over a head's matrix where it lies, from number `first` of the state on: the numbers are the
    same as by `_pass_tokens`, and each is read and written once.
    """
    width, done, size = recurrent.value_dim, 0, recurrent.key_dim * recurrent.value_dim
    while done < size:
        at, count = numbers_from(recurrent.places, layer, tokens.seq, steps, first + done)
        row, column, count = done // width, done % width, min(count, size - done)
        num_rows = max(1, count // width) if column == 0 else 1
        count = num_rows * width if column == 0 and count >= width else min(count, width - column)
        num_vectors = min(count, width) // LANES
        for vector in range(0, num_vectors, 2):
            columns = HeadMatrix(at + vector * VECTOR_BYTES, num_rows, VECTOR_BYTES)
            seen = _from(token, row, column // LANES + vector)
            if vector + 2 <= num_vectors:
                scan_columns(columns, width * FLOAT_BYTES, seen, 2)
            else:
                scan_columns(columns, width * FLOAT_BYTES, seen, 1)
        done += count


@jit
def gate_and_norm(recurrent: Recurrent, layer: int, own: Range, rows: MixedRows) -> None:
    """Gate the results of some rows, and norm them: the heads that share a key head together."""
    width, norm_width = recurrent.rates.shape[1] * recurrent.value_dim, recurrent.norms.shape[1]
    of_group, scan = width // recurrent.num_key_heads, recurrent.scan
    norm, num_vectors = address(recurrent.norms) + layer * norm_width * FLOAT_BYTES, of_group // LANES
    for row in range(own.first, own.end):
        gates, out = rows.projected + row * rows.step, rows.out + row * rows.out_step
        scale_row(gates, width // LANES, scan.gate_factor, gates)
        if scan.gate_first or not norm_width:
            gate_row(out, gates, width // LANES, _ONE, 1)
        for first in range(0, norm_width * FLOAT_BYTES, of_group * FLOAT_BYTES):
            mean = weigh_row(out + first, norm + first, num_vectors, out + first) / np.float32(of_group)
            factor = _ONE / np.sqrt(mean + recurrent.eps)
            if scan.gate_first:
                scale_row(out + first, num_vectors, factor, out + first)
            else:
                gate_row(out + first, gates + first, num_vectors, factor, 1)
