"""The heads of Mamba 2, for the tokens of one sequence: see engine/models/recurrent/scan.py.

Many heads share keys and queries, so all channels are convolved first, then each head passes by itself, and then whole
rows are gated and normed. A head's matrix is copied to where 32 of its columns stay in the L1 cache, as in
delta_heads.py.
"""

import numpy as np

from engine.kernels.cpu.arguments import Floats, Range, Recurrent, StateSteps
from engine.kernels.cpu.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES, VECTOR_BYTES
from engine.kernels.cpu.recurrent_vectors import HeadMatrix, Scanned, gate_row, scan_columns
from engine.kernels.cpu.states import MixedRows, State, Tokens, convolve_tokens, copy_matrix, softplus
from engine.kernels.cpu.vectors import address, read_float, scale_row, weigh_row, write_float

_ONE = np.float32(1.0)
_NOTHING = np.float32(0.0)


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
    num_heads, channels, scan = recurrent.rates.shape[1], recurrent.taps.shape[2], recurrent.scan
    step_at = (num_heads * recurrent.value_dim + channels + head) * FLOAT_BYTES
    decays = np.empty(tokens.end - tokens.first, np.float32)
    for token in range(tokens.first, tokens.end):
        at = rows.projected + token * rows.step + step_at
        step = softplus(read_float(at) * scan.step_factor + recurrent.rate_biases[layer, head])
        step = min(max(step, scan.least_step), scan.most_step)
        write_float(at, step)
        decays[token - tokens.first] = np.exp(recurrent.rates[layer, head] * step)
    state_at = (recurrent.taps.shape[1] - 1) * channels + head * len(matrix)
    if tokens.is_first:
        matrix[:] = _NOTHING
    else:
        copy_matrix(recurrent, State(layer, tokens.seq), steps, state_at, matrix, False)
    _pass_tokens(recurrent, layer, Range(tokens.first, tokens.kept_end), tokens.first, head, decays, matrix, rows)
    if tokens.kept_end > tokens.first or tokens.is_first:
        copy_matrix(recurrent, State(layer, tokens.seq), steps, state_at, matrix, True)
    _pass_tokens(recurrent, layer, Range(tokens.kept_end, tokens.end), tokens.first, head, decays, matrix, rows)


@jit
def _pass_tokens(
    recurrent: Recurrent,
    layer: int,
    own: Range,
    first: int,
    head: int,
    decays: Floats,
    matrix: Floats,
    rows: MixedRows,
) -> None:
    """Let some tokens pass over the matrix of a head. first: the token of the first decay."""
    num_vectors, step = recurrent.value_dim // LANES, recurrent.key_dim * VECTOR_BYTES
    for vector in range(0, num_vectors, 2):
        columns = HeadMatrix(address(matrix) + vector * step, recurrent.key_dim, step)
        for token in range(own.first, own.end):
            scanned = _scanned(recurrent, layer, head, decays[token - first], rows, token, vector)
            if vector + 2 <= num_vectors:
                scan_columns(columns, scanned, 2)
            else:
                scan_columns(columns, scanned, 1)


@jit
def _scanned(
    recurrent: Recurrent, layer: int, head: int, decay: np.float32, rows: MixedRows, token: int, vector: int
) -> Scanned:
    """A token as a head's columns see it, from vector number `vector` on."""
    num_heads, key_dim, width = recurrent.rates.shape[1], recurrent.key_dim, recurrent.value_dim
    row, inner = rows.projected + token * rows.step, num_heads * width
    key = 2 * inner + head // (num_heads // recurrent.num_key_heads) * key_dim
    column = head * width + vector * LANES
    return Scanned(
        decay,
        read_float(row + (inner + recurrent.taps.shape[2] + head) * FLOAT_BYTES),
        recurrent.skips[layer, head],
        row + key * FLOAT_BYTES,
        row + (key + recurrent.num_key_heads * key_dim) * FLOAT_BYTES,
        row + (inner + column) * FLOAT_BYTES,
        rows.out + token * rows.out_step + column * FLOAT_BYTES,
    )


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
