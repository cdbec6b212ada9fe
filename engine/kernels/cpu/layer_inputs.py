"""Inputs of layers (per-layer embeddings, Gemma 3n): a layer adds something for the token itself to the residual,
through a gate that the residual opens. It is the sum of a row of a table and a projection of the embedded token.
"""

from typing import TYPE_CHECKING

import numpy as np

from engine.kernels.cpu.activations import activate_rows
from engine.kernels.cpu.adapters import INPUT_GATE_SITE, INPUT_PROJECTION_SITE, expand, shrink
from engine.kernels.cpu.arguments import INPUT_OUT_NORM, Floats, LayerInputs, Part, Range
from engine.kernels.cpu.barrier import Team, share_of
from engine.kernels.cpu.compiler import jit
from engine.kernels.cpu.finish import STORE
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES
from engine.kernels.cpu.matmul import Target, product
from engine.kernels.cpu.phases import DOWN, GATE_UP, QUANTISE, finish_phase
from engine.kernels.cpu.rows import Norm, add_normed, norm_row, put_rows
from engine.kernels.cpu.vectors import address, mix_rows, weigh_row

if TYPE_CHECKING:
    from engine.kernels.cpu.step_arguments import Matrices, ModelConstants, ThreadMemory

_HALF_ROOT = np.float32(0.5**0.5)


@jit
def _join(inputs: LayerInputs, projected: Floats, of_tokens: Floats, own: Range) -> None:
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
def _open_gates(gates: Floats, inputs: Floats, layer: int, activation: int, own: Range) -> None:
    """gates = activation(gates) * the layer's inputs, in the rows of gates [num_tokens, width] in the range."""
    width = gates.shape[1]
    activate_rows(gates, activation, gates[0], own)
    for r in range(own.first, own.end):
        gate = address(gates) + r * width * FLOAT_BYTES
        weigh_row(gate, address(inputs) + (r * inputs.shape[1] + layer * width) * FLOAT_BYTES, width // LANES, gate)


@jit
def compute_layer_inputs(model: "ModelConstants", memory: "ThreadMemory", team: Team) -> None:
    """Compute what all layers add for the tokens themselves. There is one rank."""
    acts, operand, weights, part = memory.acts, memory.operand, model.weights, Part(team.thread, team.num_threads)
    rows, matrix = share_of(len(acts.residual), team.number, team.num_all), len(weights.matrices) - 1
    put_rows(acts.residual, acts.residual.shape[1], weights, matrix, operand, rows)
    finish_phase(team, QUANTISE)
    product(operand, weights, matrix, Target(acts.inputs, STORE), part)
    finish_phase(team, GATE_UP)
    _join(model.inputs, acts.inputs, acts.token_inputs, rows)


@jit
def add_layer_input(
    model: "ModelConstants", memory: "ThreadMemory", team: Team, layer: int, matrices: "Matrices"
) -> None:
    """Add the layer's input to the residual, and scale that."""
    acts, operand, weights, part = memory.acts, memory.operand, model.weights, Part(team.thread, team.num_threads)
    rows, adapted, width = share_of(len(acts.residual), team.number, team.num_all), memory.adapted, model.inputs.width
    put_rows(acts.residual, acts.residual.shape[1], weights, matrices.input_gate, operand, rows)
    shrink(adapted, layer, INPUT_GATE_SITE, acts.residual, acts.residual.shape[1], rows)
    finish_phase(team, QUANTISE)
    product(operand, weights, matrices.input_gate, Target(acts.input_gates, STORE), part)
    finish_phase(team, GATE_UP)
    expand(adapted, layer, INPUT_GATE_SITE, acts.input_gates, rows)
    _open_gates(acts.input_gates, acts.inputs, layer, model.family.activation, rows)
    put_rows(acts.input_gates, width, weights, matrices.input_projection, operand, rows)
    shrink(adapted, layer, INPUT_PROJECTION_SITE, acts.input_gates, width, rows)
    finish_phase(team, QUANTISE)
    product(operand, weights, matrices.input_projection, Target(acts.own_branch, STORE), part)
    finish_phase(team, DOWN)
    expand(adapted, layer, INPUT_PROJECTION_SITE, acts.branch, rows)
    norm = Norm(model.norms[layer, INPUT_OUT_NORM], model.eps)
    add_normed(acts.branch, norm, model.scalars[layer], acts.residual, rows)
