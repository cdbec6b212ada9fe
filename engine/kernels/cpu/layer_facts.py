"""What a layer of a model has for itself: the numbers of its matrices, its heads, the place of its KV, its widths."""

from typing import NamedTuple

from engine.kernels.cpu.arguments import Attending, Floats, HeadShape, LayerPlace, Queries, Window
from engine.kernels.cpu.compiler import jit
from engine.kernels.cpu.step_arguments import ModelConstants, Work


class Matrices(NamedTuple):
    """Numbers of a layer's matrices in `Weights`."""

    qkv: int
    output: int
    gate_up: int
    down: int
    input_gate: int  # of a layer's own input; see layer_inputs.py
    input_projection: int


@jit
def matrices_of(model: ModelConstants, layer: int) -> Matrices:
    first = model.firsts[layer]
    return Matrices(first, first + 1, first + 2, first + 3, first - 2, first - 1)


@jit
def window_of(model: ModelConstants, layer: int) -> Window:
    return Window(model.windows[layer, 0], model.windows[layer, 1])


@jit
def place_of(model: ModelConstants, layer: int) -> LayerPlace:
    return LayerPlace(layer, model.numbers[layer], model.groups[layer], model.own_kv[layer] == 1)


@jit
def attending_of(model: ModelConstants, work: Work, layer: int) -> Attending:
    """The arguments of attention with the layer's heads."""
    given, shape, heads = work.attending, model.shape, model.heads[layer]
    own = HeadShape(
        shape.num_heads,
        heads[0],
        heads[1],
        heads[2],
        shape.block_size,
        heads[3],
        shape.num_planes,
        shape.scale,
        shape.softcap,
    )
    queries = Queries(given.queries.rows, given.queries.step, given.queries.out, model.widths[layer, 0])
    return Attending(queries, own, given.batch, given.scratch, given.splits, given.slopes, given.sinks)


@jit
def with_width(rows: Floats, width: int) -> Floats:
    """Rows of this width in the memory of wider ones."""
    return rows.reshape(-1)[: len(rows) * width].reshape(len(rows), width)
