"""Inputs of the products at the start of attention, a recurrence or the MLP."""

from typing import TYPE_CHECKING

from engine.kernels.cpu.adapters import GATE_UP_SITE, norm_and_shrink, shrink
from engine.kernels.cpu.arguments import INPUT_NORM, POST_NORM, Range
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.rows import Norm, norm_rows, put_rows

if TYPE_CHECKING:
    from engine.kernels.cpu.step_arguments import ModelConstants, ThreadMemory


@jit
def put_inputs(
    model: "ModelConstants", memory: "ThreadMemory", rows: Range, layer: int, site: int, matrix: int
) -> None:
    """Write rows of the residual, normed in most models, to the operand of the product with a matrix at the start of
    attention, a recurrence or the MLP.
    """
    residual, weights, operand, adapted = memory.acts.residual, model.weights, memory.operand, memory.adapted
    if model.family.norms_inputs:
        norm = Norm(model.norms[layer, POST_NORM if site == GATE_UP_SITE else INPUT_NORM], model.eps)
        norm_rows(residual, norm, weights, matrix, operand, rows)
        norm_and_shrink(adapted, layer, site, residual, norm, rows)
    else:
        put_rows(residual, residual.shape[1], weights, matrix, operand, rows)
        shrink(adapted, layer, site, residual, residual.shape[1], rows)
