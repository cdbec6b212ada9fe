"""The heads of a gated delta net, for the tokens of one sequence: see engine/models/recurrent/delta.py.

A head's matrix is copied to where 32 of its columns stay in the L1 cache: these take all tokens before the next columns
do, because columns do not depend on each other. So a long prompt costs the multiplications and no more.
"""

import numpy as np

from engine.kernels.cpu.activations import sigmoid
from engine.kernels.cpu.arguments import Floats, Range
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES, VECTOR_BYTES
from engine.kernels.cpu.recurrent.recurrent_arguments import Recurrent, StateSteps
from engine.kernels.cpu.recurrent.recurrent_vectors import Change, HeadMatrix, Seen, advance, dot_rows, gate_row
from engine.kernels.cpu.recurrent.states import MixedRows, Tokens, convolve_tokens, copy_matrix, softplus
from engine.kernels.cpu.vectors import address, read_float, scale_row, weigh_row, write_float

_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
_LENGTH_EPS = np.float32(1e-6)


@jit
def mix_heads(
    recurrent: Recurrent,
    layer: int,
    steps: StateSteps,
    tokens: Tokens,
    key_head: int,
    matrix: Floats,
    rows: MixedRows,
) -> None:
    """The value heads of a gated delta net that share a key head. Rows are [queries, keys, values, gate of the result,
    strengths, decays]. matrix: scratch.
    """
    key_dim, num_vectors = recurrent.key_dim, recurrent.key_dim // LANES
    query_at, key_at = key_head * key_dim, (recurrent.num_key_heads + key_head) * key_dim
    for column in (query_at, key_at):
        convolve_tokens(recurrent, layer, steps, tokens, Range(column, column + key_dim), rows)
    products, scale = np.empty(tokens.end - tokens.first, np.float32), _ONE / np.sqrt(np.float32(key_dim))
    for token in range(tokens.first, tokens.end):
        row = rows.projected + token * rows.step
        query, key = row + query_at * FLOAT_BYTES, row + key_at * FLOAT_BYTES
        for vector, length in ((query, scale), (key, _ONE)):
            factor = length / np.sqrt(dot_rows(vector, vector, num_vectors) + _LENGTH_EPS)
            scale_row(vector, num_vectors, factor, vector)
        products[token - tokens.first] = dot_rows(query, key, num_vectors)
    copies = recurrent.rates.shape[1] // recurrent.num_key_heads
    for head in range(key_head * copies, (key_head + 1) * copies):
        _mix_head(recurrent, layer, steps, tokens, head, products, matrix, rows)


@jit
def _mix_head(
    recurrent: Recurrent,
    layer: int,
    steps: StateSteps,
    tokens: Tokens,
    head: int,
    products: Floats,
    matrix: Floats,
    rows: MixedRows,
) -> None:
    """One value head, whose query and key are computed. matrix: scratch."""
    num_heads, width, key_width = recurrent.rates.shape[1], recurrent.value_dim, len(matrix)
    values_at = 2 * recurrent.num_key_heads * recurrent.key_dim + head * width
    convolve_tokens(recurrent, layer, steps, tokens, Range(values_at, values_at + width), rows)
    numbers_at = recurrent.taps.shape[2] + num_heads * width + head
    for token in range(tokens.first, tokens.end):
        strength = rows.projected + token * rows.step + numbers_at * FLOAT_BYTES
        decay = strength + num_heads * FLOAT_BYTES
        write_float(strength, sigmoid(read_float(strength)))
        rate = recurrent.rates[layer, head]
        write_float(decay, np.exp(rate * softplus(read_float(decay) + recurrent.rate_biases[layer, head])))
    state_at = (recurrent.taps.shape[1] - 1) * recurrent.taps.shape[2] + head * key_width
    if tokens.is_first:
        matrix[:] = _ZERO
    else:
        copy_matrix(recurrent, layer, tokens.seq, steps, state_at, matrix, False)
    num_kept = tokens.kept_end - tokens.first
    _advance_columns(recurrent, Range(tokens.first, tokens.kept_end), head, products[:num_kept], matrix, rows)
    if tokens.kept_end > tokens.first or tokens.is_first:
        copy_matrix(recurrent, layer, tokens.seq, steps, state_at, matrix, True)
    _advance_columns(recurrent, Range(tokens.kept_end, tokens.end), head, products[num_kept:], matrix, rows)
    gates_at, norm = recurrent.taps.shape[2] + head * width, address(recurrent.norms) + layer * width * FLOAT_BYTES
    for token in range(tokens.first, tokens.end):
        out = rows.out + token * rows.out_step + head * width * FLOAT_BYTES
        mean = weigh_row(out, norm, width // LANES, out) / np.float32(width)
        gates = rows.projected + token * rows.step + gates_at * FLOAT_BYTES
        gate_row(out, gates, width // LANES, _ONE / np.sqrt(mean + recurrent.eps), 1)


@jit
def _advance_columns(
    recurrent: Recurrent, own: Range, head: int, products: Floats, matrix: Floats, rows: MixedRows
) -> None:
    """Let some tokens, of which these are the products, pass over the columns of a head's matrix."""
    if own.first == own.end:
        return
    num_vectors = recurrent.value_dim // LANES
    for vector in range(0, num_vectors, 2):
        if vector + 2 <= num_vectors:
            _advance_some(recurrent, own, head, products, matrix, rows, vector, 2)
        else:
            _advance_some(recurrent, own, head, products, matrix, rows, vector, 1)


@jit
def _advance_some(
    recurrent: Recurrent,
    own: Range,
    head: int,
    products: Floats,
    matrix: Floats,
    rows: MixedRows,
    vector: int,
    count: int,
) -> None:
    """The columns of `count` vectors from number `vector` on. A token changes them when the next one sees them, so that
    they are read once a token.
    """
    change = np.zeros(2 * LANES, np.float32)
    step = recurrent.key_dim * VECTOR_BYTES
    columns = HeadMatrix(address(matrix) + vector * step, recurrent.key_dim, step)
    before = Change(_ONE, address(matrix), address(change))
    for token in range(own.first, own.end):
        seen = _seen(recurrent, head, products[token - own.first], rows, token, vector)
        if count == 2:
            advance(columns, before, seen, 2)
        else:
            advance(columns, before, seen, 1)
        before = Change(seen.decay, seen.key, address(change))
    nobody = np.empty(2 * LANES, np.float32)
    seen = Seen(_ZERO, _ZERO, _ZERO, before.key, before.key, address(nobody), address(nobody))
    if count == 2:
        advance(columns, before, seen, 2)
    else:
        advance(columns, before, seen, 1)


@jit
def _seen(recurrent: Recurrent, head: int, product: np.float32, rows: MixedRows, token: int, vector: int) -> Seen:
    """A token as a head's columns see it, from vector number `vector` on."""
    num_heads, key_dim, width = recurrent.rates.shape[1], recurrent.key_dim, recurrent.value_dim
    row, key_head = rows.projected + token * rows.step, head // (num_heads // recurrent.num_key_heads)
    numbers = row + (recurrent.taps.shape[2] + num_heads * width + head) * FLOAT_BYTES
    column = head * width + vector * LANES
    return Seen(
        read_float(numbers + num_heads * FLOAT_BYTES),
        read_float(numbers),
        product,
        row + (recurrent.num_key_heads + key_head) * key_dim * FLOAT_BYTES,
        row + key_head * key_dim * FLOAT_BYTES,
        row + (2 * recurrent.num_key_heads * key_dim + column) * FLOAT_BYTES,
        rows.out + token * rows.out_step + column * FLOAT_BYTES,
    )
