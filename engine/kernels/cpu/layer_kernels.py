"""Kernels of layers that few models have: recurrences, latent attention, experts, inputs of layers.

`step.run_layers` calls them by their addresses, with its own arguments. With all of them in it, the loop would take
twice as long to compile.
"""

import numpy as np

from engine.kernels.cpu.adapters import (
    INPUT_GATE_SITE,
    INPUT_PROJECTION_SITE,
    RECURRENT_IN_SITE,
    changes_site,
    expand,
    shrink,
)
from engine.kernels.cpu.arguments import (
    EXPERTS_NORM,
    EXPERTS_OUT_NORM,
    INPUT_NORM,
    INPUT_OUT_NORM,
    MLP_OUT_NORM,
    POST_NORM,
    ROUTER_NORM,
    Part,
    Range,
)
from engine.kernels.cpu.attention.batch import attend, has_splits, join
from engine.kernels.cpu.attention.latent import (
    project_queries,
    project_results,
    put_queries,
    rotate_and_store_latents,
)
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.compilation.stored import Addresses, Kernel, Kinds, load
from engine.kernels.cpu.experts import (
    add_results,
    copies_of,
    multiply_down,
    multiply_up,
    put_copies,
    put_inner,
)
from engine.kernels.cpu.layer_inputs import join_inputs, open_gates
from engine.kernels.cpu.products.finish import STORE
from engine.kernels.cpu.products.matmul import Target, product
from engine.kernels.cpu.products.product_inputs import put_inputs
from engine.kernels.cpu.recurrent.recurrence import call_mix
from engine.kernels.cpu.recurrent.recurrent_arguments import (
    CHANNELS,
    CONVOLVE,
    GATE_ROWS,
    MIX,
    PROJECT,
    PROJECT_STEPS,
    SCAN,
    MixPart,
    StepRows,
)
from engine.kernels.cpu.routing import route_rows
from engine.kernels.cpu.rows import Norm, add_normed, norm_rows, put_normed, put_rows
from engine.kernels.cpu.step_arguments import (
    ALL_INPUTS,
    EXPERTS,
    LATENT_ATTENTION,
    LAYER_INPUT,
    RECURRENCE,
    ModelConstants,
    StepBatch,
    ThreadMemory,
    attending_of,
    matrices_of,
    place_of,
    window_of,
)
from engine.kernels.cpu.threads.barrier import publish_rows, share_of, wait_for_earlier_rows
from engine.kernels.cpu.threads.phases import (
    ATTENTION,
    DOWN,
    GATE_UP,
    NORM,
    QKV,
    QUANTISE,
    STORE_KV,
    finish_phase,
)

_ONE = np.float32(1.0)


@Kernel
def compute_recurrence(kinds: Kinds, addresses: Addresses, layers: Range) -> None:
    """`step._write_kv` of a recurrence, with its results. There is one rank. In a layer with both, attention lets later
    rows go on.
    """
    model, memory, step, team = load(kinds, addresses)
    layer = layers.first
    acts, part, kind = memory.acts, Part(team.thread, team.num_threads), model.recurrent.kind
    rows, matrix = share_of(len(acts.residual), team.number, team.num_all), matrices_of(model, layer).recurrent_in
    put_inputs(model, memory, rows, layer, RECURRENT_IN_SITE, matrix)
    finish_phase(team, NORM)
    product(memory.operand, model.weights, matrix, Target(acts.projected, STORE), part)
    finish_phase(team, QKV)
    if changes_site(memory.adapted, layer, RECURRENT_IN_SITE):
        expand(memory.adapted, layer, RECURRENT_IN_SITE, acts.projected, rows)
        finish_phase(team, QKV)
    wait_for_earlier_rows(team.share, layer)
    if kind in (SCAN, CHANNELS):
        _mix(model, memory, step, layer, CONVOLVE, part)
        finish_phase(team, ATTENTION)
    if kind == CHANNELS:
        _mix(model, memory, step, layer, PROJECT, part)
        finish_phase(team, QKV)
        _mix(model, memory, step, layer, PROJECT_STEPS, part)
        finish_phase(team, QKV)
    _mix(model, memory, step, layer, MIX, part)
    finish_phase(team, ATTENTION)
    if kind == SCAN:
        _mix(model, memory, step, layer, GATE_ROWS, part)
    if not model.have_attention[layer]:
        publish_rows(team.share, team.thread, layer)


@jit
def _mix(model: ModelConstants, memory: ThreadMemory, step: StepBatch, layer: int, stage: int, part: Part) -> None:
    acts, number, own = memory.acts, model.state_numbers[layer], MixPart(stage, part.number, part.num_parts)
    rows = StepRows(acts.projected, acts.inner_recurrent, acts.recurred)
    call_mix(model.mix_at, model.recurrent, number, step.states, rows, own)


@Kernel
def compute_latent_attention(kinds: Kinds, addresses: Addresses, layers: Range) -> None:
    """`step._write_kv` and `step._attend` over latents. There is one rank, which has no adapters."""
    model, memory, step, team = load(kinds, addresses)
    layer = layers.first
    latent, weights, attending, buffers = (
        model.latent,
        model.weights,
        attending_of(model, memory, step, layer),
        memory.acts.latent,
    )
    operand, qkv, window = memory.operand, matrices_of(model, layer).qkv, window_of(model, layer)
    part, rows = Part(team.thread, team.num_threads), share_of(len(memory.acts.residual), team.thread, team.num_threads)
    norm_rows(memory.acts.residual, Norm(model.norms[layer, INPUT_NORM], model.eps), weights, qkv, operand, rows)
    finish_phase(team, NORM)
    product(operand, weights, qkv, Target(buffers.projected.reshape(-1, buffers.step), STORE), part)
    finish_phase(team, QKV)
    if latent.query_rank:
        put_queries(latent, layer, buffers, weights, qkv - 1, operand, rows)
        finish_phase(team, QUANTISE)
        product(operand, weights, qkv - 1, Target(buffers.queries.reshape(-1, buffers.query_step), STORE), part)
        finish_phase(team, QKV)
    rotate_and_store_latents(latent, layer, buffers, attending, model.cache, model.ropes[layer], rows)
    project_queries(latent, layer, buffers, attending, model.ropes[layer], part)
    finish_phase(team, STORE_KV)
    attend(attending, model.cache, place_of(model, layer), window, part)
    if has_splits(attending.batch, window):
        finish_phase(team, ATTENTION)
        join(attending, place_of(model, layer), window, part)
    finish_phase(team, ATTENTION)
    project_results(latent, layer, buffers, attending, part)
    finish_phase(team, ATTENTION)


@Kernel
def add_experts(kinds: Kinds, addresses: Addresses, layers: Range) -> None:
    """Add the results of the layer's experts to the residual, normed in a sandwich; beside an MLP, keep their norm in
    `routed.normed`.
    """
    model, memory, _, team = load(kinds, addresses)
    layer = layers.first
    acts, operand, experts, routed = memory.acts, memory.operand, model.experts, memory.acts.routed
    weights, part = model.weights, Part(team.thread, team.num_threads)
    rows, first = share_of(len(acts.residual), team.number, team.num_all), matrices_of(model, layer).gate_up
    norm = Norm(model.norms[layer, ROUTER_NORM if experts.are_beside else POST_NORM], model.eps)
    route_rows(experts.routing, routed, layer, acts.residual, norm, rows)
    if experts.are_beside:
        first += 2
        put_normed(acts.residual, Norm(model.norms[layer, EXPERTS_NORM], model.eps), routed.normed, rows)
    finish_phase(team, NORM)
    copies = copies_of(experts, routed)
    own_copies = share_of(len(copies.rows), team.number, team.num_all)
    put_copies(experts, routed, copies, weights, first, operand, own_copies)
    finish_phase(team, QUANTISE)
    multiply_up(experts, routed, copies, weights, first, operand, part)
    finish_phase(team, GATE_UP)
    put_inner(experts, routed, copies, weights, first, operand, own_copies)
    finish_phase(team, QUANTISE)
    multiply_down(experts, routed, copies, weights, first, operand, part)
    finish_phase(team, DOWN)
    if experts.are_beside:
        routed.normed[rows.first : rows.end] = 0
        add_results(experts, routed, copies, routed.normed, rows)
        put_normed(routed.normed, Norm(model.norms[layer, EXPERTS_OUT_NORM], model.eps), routed.normed, rows)
    elif model.family.sandwich:
        acts.branch[rows.first : rows.end] = 0
        add_results(experts, routed, copies, acts.branch, rows)
        norm = Norm(model.norms[layer, MLP_OUT_NORM], model.eps)
        add_normed(acts.branch, norm, _ONE, acts.residual, rows)
    else:
        add_results(experts, routed, copies, acts.residual, rows)


@Kernel
def compute_layer_inputs(kinds: Kinds, addresses: Addresses, _: Range) -> None:
    """Compute what all layers add for the tokens themselves. There is one rank."""
    model, memory, _step, team = load(kinds, addresses)
    acts, operand, weights, part = memory.acts, memory.operand, model.weights, Part(team.thread, team.num_threads)
    rows, matrix = share_of(len(acts.residual), team.number, team.num_all), len(weights.matrices) - 1
    put_rows(acts.residual, acts.residual.shape[1], weights, matrix, operand, rows)
    finish_phase(team, QUANTISE)
    product(operand, weights, matrix, Target(acts.inputs, STORE), part)
    finish_phase(team, GATE_UP)
    join_inputs(model.inputs, acts.inputs, acts.token_inputs, rows)


@Kernel
def add_layer_input(kinds: Kinds, addresses: Addresses, layers: Range) -> None:
    """Add the layer's input to the residual, and scale that."""
    model, memory, _, team = load(kinds, addresses)
    layer = layers.first
    matrices = matrices_of(model, layer)
    acts, operand, weights, part = memory.acts, memory.operand, model.weights, Part(team.thread, team.num_threads)
    rows, adapted, width = share_of(len(acts.residual), team.number, team.num_all), memory.adapted, model.inputs.width
    put_rows(acts.residual, acts.residual.shape[1], weights, matrices.input_gate, operand, rows)
    shrink(adapted, layer, INPUT_GATE_SITE, acts.residual, acts.residual.shape[1], rows)
    finish_phase(team, QUANTISE)
    product(operand, weights, matrices.input_gate, Target(acts.input_gates, STORE), part)
    finish_phase(team, GATE_UP)
    expand(adapted, layer, INPUT_GATE_SITE, acts.input_gates, rows)
    open_gates(acts.input_gates, acts.inputs, layer, model.family.activation, rows)
    put_rows(acts.input_gates, width, weights, matrices.input_projection, operand, rows)
    shrink(adapted, layer, INPUT_PROJECTION_SITE, acts.input_gates, width, rows)
    finish_phase(team, QUANTISE)
    product(operand, weights, matrices.input_projection, Target(acts.own_branch, STORE), part)
    finish_phase(team, DOWN)
    expand(adapted, layer, INPUT_PROJECTION_SITE, acts.branch, rows)
    norm = Norm(model.norms[layer, INPUT_OUT_NORM], model.eps)
    add_normed(acts.branch, norm, model.scalars[layer], acts.residual, rows)


LAYER_KERNELS = {
    RECURRENCE: compute_recurrence,
    LATENT_ATTENTION: compute_latent_attention,
    EXPERTS: add_experts,
    ALL_INPUTS: compute_layer_inputs,
    LAYER_INPUT: add_layer_input,
}


def needed_by(model: ModelConstants) -> list[int]:
    """Numbers of the kernels that some of a model's layers need."""
    numbers = [RECURRENCE] if model.are_recurrent.any() else []
    numbers += [LATENT_ATTENTION] if model.latent.rank else []
    numbers += [EXPERTS] if model.experts.num_experts else []
    return numbers + ([ALL_INPUTS, LAYER_INPUT] if model.inputs.width else [])
