"""Types of the arguments of `step.py`: the constants of a model, what one thread works with in a step, and what a layer
has of both for itself.
"""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.adapters import StepAdapters
from engine.kernels.cpu.arguments import (
    Attending,
    AttentionScratch,
    Batch,
    Cache,
    CacheCode,
    Floats,
    HeadShape,
    Int64s,
    LayerPlace,
    Operand,
    Queries,
    RoutedRows,
    Splits,
    Weights,
    Window,
)
from engine.kernels.cpu.attention.latent import Latent, LatentRows
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.experts import Experts
from engine.kernels.cpu.layer_inputs import LayerInputs
from engine.kernels.cpu.recurrent.recurrent_arguments import Recurrent, StateSteps
from engine.kernels.cpu.sampling.logits import Summaries

NUM_LAYER_KERNELS = 5
RECURRENCE, LATENT_ATTENTION, EXPERTS, ALL_INPUTS, LAYER_INPUT = range(NUM_LAYER_KERNELS)
"""Numbers of the kernels in `layer_kernels.py`."""


class Family(NamedTuple):
    """How the layers of a family differ from those of others."""

    parallel: bool  # attention and MLP both read the layer's input
    norms_inputs: bool  # attention and MLP read the normed residual, not the residual as it is
    sandwich: bool  # the outputs of attention and MLP are normed before they are added
    gated: bool
    activation: int  # SILU, GELU, GELU_TANH, RELU, RELU2 or XIELU
    gate_factor: np.float32  # multiplies gates before the activation
    inner_factor: np.float32  # multiplies what the activation gives
    centred_heads: bool  # this and the next two: see HeadNorms (head_norms.py)
    norms_rotated: bool
    norms_values: bool
    clip_qkv: np.float32  # largest magnitude of queries, keys and values; 0: no limit
    gates_attention: bool  # behind the values of a token are gates of attention's result


class ModelConstants(NamedTuple):
    """The weights and constants of a model, the same in every step.

    A layer has attention, a recurrence, an MLP or experts, or several of these.
    """

    weights: Weights  # of each layer: of its input and its recurrence two each; qkv, output; gate and up (or up alone),
    # down; with experts, these of each expert
    firsts: Int64s  # [num_layers, 3]: numbers of qkv, of the recurrence's first matrix, of gate and up
    numbers: Int64s  # [num_layers]: of the layer among those with KV
    groups: Int64s  # [num_layers]; see LayerPlace
    own_kv: Int64s  # [num_layers]: 0 of layers that read the KV of an earlier one
    heads: Int64s  # [num_layers, 4]: num_kv_heads, head_dim, row_bytes and num_slots of HeadShape
    widths: Int64s  # [num_layers, 2]: of attention's result, the heads of all ranks, and of the MLP
    state_numbers: Int64s  # [num_layers]: of the layer among recurrent ones
    have_attention: Int64s  # [num_layers]: 1 or 0, as the next two
    are_recurrent: Int64s
    have_mlp: Int64s
    output: Weights  # the output matrix of the vocabulary; in int8, or in its own type, beside weights in int4
    norms: Floats  # [num_layers, 2 or, in a sandwich, 4 or 9, 1 or 2, hidden]; see rows.Norm, INPUT_NORM
    final_norm: Floats  # [1 or 2, hidden]
    sub_norms: Floats  # [num_layers, 2, 1, larger width]: of what the matrices behind attention and at the end of the
    # MLP multiply; [num_layers, 0, 1, 0] without
    head_norms: Floats  # [num_layers, 0 or more, largest head_dim]; see HeadNorms
    scalars: Floats  # [num_layers]: factors of the residual
    activation: Floats  # [num_layers, 4]: what `activate_xielu` needs; [num_layers, 0] of other activations
    num_head_norms: Int64s  # [num_layers]: rows of head_norms; 0 of layers whose heads are not normed
    windows: Int64s  # [num_layers, 2]; see Window
    ropes: Int64s  # [num_layers]: the kind of rotary positions in `Batch`
    eps: np.float32
    shape: HeadShape  # of layers that do not say otherwise in `heads`; of several sizes the widest
    family: Family
    experts: Experts
    latent: Latent
    inputs: LayerInputs
    recurrent: Recurrent
    slopes: Floats  # see Attending
    sinks: Floats  # see Attending
    cache: Cache
    cache_code: CacheCode
    mix_at: int  # the address of `recurrence.mix`; 0 without recurrent layers
    layer_code: Int64s  # [NUM_LAYER_KERNELS]: addresses of those in layer_kernels.py; 0 where no layer needs it


def in_bytes(model: ModelConstants) -> ModelConstants:
    """The constants as the loop gets them: numbers of all types are bytes, so that it is compiled once for all."""
    weights, output = (each._replace(packed=each.packed.view(np.uint8)) for each in (model.weights, model.output))
    key_up, value_up = (each.view(np.uint8) for each in (model.latent.key_up, model.latent.value_up))
    latent = model.latent._replace(key_up=key_up, value_up=value_up)
    return model._replace(weights=weights, output=output, latent=latent, cache=model.cache.view(np.uint8))


class Activations(NamedTuple):
    """Intermediate results of a layer, as wide as those of the widest layer. All threads of all ranks share them,
    except qkv.

    Products write to `own_residual`, `own_branch`, `own_inner` and `own_gate_up`. These have the shape of the arrays
    without `own`, and begin at the first column that the rank computes.
    """

    residual: Floats  # [num_tokens, hidden]
    own_residual: Floats
    branch: Floats  # [num_tokens, hidden], what attention and MLP of a sandwich have computed; else [0, hidden]
    own_branch: Floats
    inner: Floats  # [num_tokens, intermediate]
    own_inner: Floats
    gate_up: Floats  # [num_tokens, 2 * intermediate], panels of gates and ups alternate; without use [0, ..]
    own_gate_up: Floats
    attended: Floats  # [num_tokens, num_heads * width of a result], the heads of all ranks
    qkv: Floats  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], the rank's heads, and gates of queries
    queries: Queries  # over qkv and the rank's part of attended; of latent attention over memory of its own
    squares: Floats  # see HeadNorms
    own_squares: Floats
    routed: RoutedRows  # of layers with experts
    latent: LatentRows
    projected: Floats  # [num_tokens, width]: what recurrent layers mix
    inner_recurrent: Floats  # [num_tokens, width]: what Mamba 1 projects its steps from, keys and queries
    recurred: Floats  # [num_tokens, width]: what they have mixed
    inputs: Floats  # [num_tokens, num_layers * width]: what layers add for the token itself; else [.., 0]
    token_inputs: Floats  # like inputs: what the table has of them
    input_gates: Floats  # [num_tokens, width]


class ThreadMemory(NamedTuple):
    """The memory in which one thread computes."""

    acts: Activations
    operand: Operand
    scratch: AttentionScratch
    splits: Splits
    adapted: StepAdapters


class StepBatch(NamedTuple):
    """The tokens and states that the threads of a row share compute."""

    batch: Batch
    states: StateSteps


class OutputRows(NamedTuple):
    hidden: Floats  # [rows, hidden]: rows of the residual
    logits: Floats  # [rows, vocab_size in whole panels]
    own_logits: Floats  # from the first column on that the rank computes
    num_columns: int
    scale: np.float32
    softcap: np.float32  # 0: none
    summaries: Summaries


class Matrices(NamedTuple):
    """Numbers of a layer's matrices in `Weights`."""

    qkv: int
    output: int
    recurrent_in: int
    recurrent_out: int
    gate_up: int
    down: int
    input_gate: int  # of a layer's own input; see layer_inputs.py
    input_projection: int


@jit
def matrices_of(model: ModelConstants, layer: int) -> Matrices:
    qkv, recurrent, gate_up = model.firsts[layer]
    return Matrices(qkv, qkv + 1, recurrent, recurrent + 1, gate_up, gate_up + 1, qkv - 2, qkv - 1)


@jit
def window_of(model: ModelConstants, layer: int) -> Window:
    return Window(model.windows[layer, 0], model.windows[layer, 1])


@jit
def place_of(model: ModelConstants, layer: int) -> LayerPlace:
    return LayerPlace(layer, model.numbers[layer], model.groups[layer], model.own_kv[layer] == 1)


@jit
def attending_of(model: ModelConstants, memory: ThreadMemory, step: StepBatch, layer: int) -> Attending:
    """The arguments of attention with the layer's heads."""
    shape, heads = model.shape, model.heads[layer]
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
    places = memory.acts.queries, own, step.batch, memory.scratch, memory.splits
    return Attending(*places, model.cache_code, model.slopes, model.sinks)
