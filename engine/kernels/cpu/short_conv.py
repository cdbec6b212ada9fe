"""Causal convolutions of the channels of a recurrent layer, for the tokens of one sequence.

Their past is in scratch while tokens pass, and written to the state behind the last token that it keeps.
"""

import numpy as np

from engine.kernels.cpu.activations import activate
from engine.kernels.cpu.arguments import SILU, Address, Floats, Range, Recurrent, StateSteps
from engine.kernels.cpu.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES
from engine.kernels.cpu.recurrent_vectors import Taps, convolve
from engine.kernels.cpu.states import MixedRows, State, Tokens, copy_row
from engine.kernels.cpu.vectors import address, weigh_row


@jit
def mix_channels(
    recurrent: Recurrent, layer: int, steps: StateSteps, tokens: Tokens, own: Range, rows: MixedRows
) -> None:
    """Some channels of a short convolution: rows are [input gate, gate, input]."""
    width, num_vectors = recurrent.taps.shape[2] * FLOAT_BYTES, (own.end - own.first) // LANES
    inputs = np.empty(own.end - own.first, np.float32)
    past = _begin(recurrent, layer, steps, tokens, own)
    for token in range(tokens.first, tokens.end):
        if token == tokens.kept_end:
            _keep(recurrent, layer, steps, tokens, own, past)
        row = rows.projected + token * rows.step + own.first * FLOAT_BYTES
        out = rows.out + token * rows.out_step + own.first * FLOAT_BYTES
        weigh_row(row, row + 2 * width, num_vectors, address(inputs))
        _convolve(recurrent, layer, own, past, address(inputs), out)
        weigh_row(out, row + width, num_vectors, out)
    if tokens.kept_end == tokens.end:
        _keep(recurrent, layer, steps, tokens, own, past)


@jit
def convolve_tokens(
    recurrent: Recurrent, layer: int, steps: StateSteps, tokens: Tokens, own: Range, rows: MixedRows
) -> None:
    """SiLU of the convolution of some channels, in place."""
    past = _begin(recurrent, layer, steps, tokens, own)
    for token in range(tokens.first, tokens.end):
        if token == tokens.kept_end:
            _keep(recurrent, layer, steps, tokens, own, past)
        row = rows.projected + token * rows.step + own.first * FLOAT_BYTES
        _convolve(recurrent, layer, own, past, row, row)
        activate(row, (own.end - own.first) // LANES, SILU)
    if tokens.kept_end == tokens.end:
        _keep(recurrent, layer, steps, tokens, own, past)


@jit
def _convolve(recurrent: Recurrent, layer: int, own: Range, past: Floats, inputs: Address, out: Address) -> None:
    """One token's channels of the convolution."""
    _, num_taps, channels = recurrent.taps.shape
    weights = address(recurrent.taps) + (layer * num_taps * channels + own.first) * FLOAT_BYTES
    biases = address(recurrent.biases) + (layer * channels + own.first) * FLOAT_BYTES
    taps, num_vectors = Taps(weights, channels * FLOAT_BYTES, biases), (own.end - own.first) // LANES
    convolve(inputs, taps, address(past), num_taps - 1, num_vectors, out)


@jit
def _begin(recurrent: Recurrent, layer: int, steps: StateSteps, tokens: Tokens, own: Range) -> Floats:
    """The inputs of some channels before the first token: [kernel - 1, channels], and room for one more row."""
    num_past, channels, width = recurrent.taps.shape[1] - 1, recurrent.taps.shape[2], own.end - own.first
    past = np.zeros((num_past + 1) * width, np.float32)
    if not tokens.is_first:
        for tap in range(num_past):
            state, at = State(layer, tokens.seq), address(past) + tap * width * FLOAT_BYTES
            copy_row(recurrent.places, state, steps, tap * channels + own.first, width, at, False)
    return past


@jit
def _keep(recurrent: Recurrent, layer: int, steps: StateSteps, tokens: Tokens, own: Range, past: Floats) -> None:
    """Write the last inputs of some channels to the state."""
    num_past, channels, width = recurrent.taps.shape[1] - 1, recurrent.taps.shape[2], own.end - own.first
    for tap in range(num_past):
        state, at = State(layer, tokens.seq), address(past) + tap * width * FLOAT_BYTES
        copy_row(recurrent.places, state, steps, tap * channels + own.first, width, at, True)
