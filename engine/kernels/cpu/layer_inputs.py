"""Inputs of layers (per-layer embeddings, Gemma 3n): a layer adds something for the token itself to the residual,
through a gate that the residual opens. It is the sum of a row of a table and a projection of the embedded token.
"""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.activations import activate_rows
from engine.kernels.cpu.arguments import Floats, Range
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES
from engine.kernels.cpu.rows import Norm, norm_row
from engine.kernels.cpu.vectors import address, mix_rows, weigh_row

_HALF_ROOT = np.float32(0.5**0.5)


class LayerInputs(NamedTuple):
    """Inputs of layers. Their projection is the last matrix of the model."""

    width: int  # of a layer's input; 0: there are none
    norm: Floats  # [1, width], of projections
    eps: np.float32


@jit
def join_inputs(inputs: LayerInputs, projected: Floats, of_tokens: Floats, own: Range) -> None:
    """Norm the projections of the rows in the range, and add those of the table: both [num_tokens, layers * width]."""
    width, normed = inputs.width, np.empty(inputs.width, np.float32)
    norm = Norm(inputs.norm, inputs.eps)
    for r in range(own.first, own.end):
        for first in range(0, projected.shape[1], width):
            row = projected[r, first : first + width]
            factor = _HALF_ROOT / norm_row(row, norm, normed)
            scaled = address(of_tokens) + (r * of_tokens.shape[1] + first) * FLOAT_BYTES
            mix_rows(scaled, width // LANES, _HALF_ROOT, np.float32(0.0), address(row))
            mix_rows(address(normed), width // LANES, factor, np.float32(1.0), address(row))


@jit
def open_gates(gates: Floats, inputs: Floats, layer: int, activation: int, own: Range) -> None:
    """gates = activation(gates) * the layer's inputs, in the rows of gates [num_tokens, width] in the range."""
    width = gates.shape[1]
    activate_rows(gates, activation, gates[0], own)
    for r in range(own.first, own.end):
        gate = address(gates) + r * width * FLOAT_BYTES
        weigh_row(gate, address(inputs) + (r * inputs.shape[1] + layer * width) * FLOAT_BYTES, width // LANES, gate)
