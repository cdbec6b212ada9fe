"""All layers of a decoder for one step's tokens, as one compiled loop.

The threads of one process run it together, or those of several: the ranks of a stage, each with some of the heads and
some of the columns of every matrix. All of them share the activations, so that each column is a sum over all inputs in
the same order: the results do not depend on the number of ranks, to the bit.
"""

import numpy as np

from engine.kernels.cpu.activations import activate_rows, gate_rows
from engine.kernels.cpu.adapters import (
    DOWN_SITE,
    GATE_UP_SITE,
    OUTPUT_SITE,
    QKV_SITE,
    RECURRENT_OUT_SITE,
    changes_site,
    expand,
    shrink,
)
from engine.kernels.cpu.arguments import (
    ATTENTION_OUT_NORM,
    MLP_ONLY_NORM,
    MLP_OUT_NORM,
    SILU,
    Floats,
    Part,
    Range,
)
from engine.kernels.cpu.attention.batch import attend, has_splits, join
from engine.kernels.cpu.attention.head_norms import HeadNorms, clip_rows, sum_squares
from engine.kernels.cpu.attention.scores import cap_row
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.compilation.stored import Addresses, Kernel, Kinds, call_kernel, load
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES
from engine.kernels.cpu.products.finish import ADD, GATE, STORE
from engine.kernels.cpu.products.matmul import Target, begin_products, end_products, product
from engine.kernels.cpu.products.product_inputs import put_inputs
from engine.kernels.cpu.recurrent.recurrent_vectors import gate_row
from engine.kernels.cpu.rows import Norm, add_normed, add_rows, norm_rows, put_normed, put_rows, rotate_and_store
from engine.kernels.cpu.step_arguments import (
    ALL_INPUTS,
    EXPERTS,
    LATENT_ATTENTION,
    LAYER_INPUT,
    RECURRENCE,
    Family,
    ModelConstants,
    OutputRows,
    StepBatch,
    ThreadMemory,
    attending_of,
    matrices_of,
    place_of,
    window_of,
)
from engine.kernels.cpu.threads.barrier import Team, publish_rows, share_of, wait, wait_for_earlier_rows
from engine.kernels.cpu.threads.phases import (
    ATTENTION,
    DOWN,
    GATE_UP,
    LOGITS,
    NORM,
    OUTPUT,
    QKV,
    QUANTISE,
    STORE_KV,
    finish_own_phase,
    finish_phase,
    start_phases,
)
from engine.kernels.cpu.vectors import address, index_of_largest, read_float, sum_of_exponents

_ONE = np.float32(1.0)


@Kernel
def run_layers(kinds: Kinds, addresses: Addresses, halves: Range) -> None:
    """Compute a range of halves of layers. The first half of layer i, number 2 * i, writes KV and states to the cache;
    the second one updates the residual, by attention and what follows. Every thread runs this kernel, on
    ModelConstants, ThreadMemory, StepBatch and Team. It calls the kernels in layer_kernels.py.
    """
    model, memory, step, team = load(kinds, addresses)
    operand, adapted = memory.operand, memory.adapted
    begin_products(operand)
    start_phases(team.phase_cycles)
    if halves.first == 0 and model.inputs.width:
        call_kernel(model.layer_code[ALL_INPUTS], addresses, 0)
    for layer in range(halves.first // 2, (halves.end + 1) // 2):
        if halves.first <= 2 * layer:
            if model.are_recurrent[layer]:
                call_kernel(model.layer_code[RECURRENCE], addresses, layer)
            if model.have_attention[layer] and not model.latent.rank:
                _write_kv(model, memory, step, team, layer)
        if halves.end <= 2 * layer + 1:
            break
        if model.latent.rank:
            call_kernel(model.layer_code[LATENT_ATTENTION], addresses, layer)
        elif model.have_attention[layer]:
            _attend(model, memory, step, team, layer)
        if model.family.parallel and model.experts.layers[layer]:
            call_kernel(model.layer_code[EXPERTS], addresses, layer)
            _add_attention(model, memory, team, layer)
        elif model.family.parallel:
            _compute_inner(model, memory, team, layer)
            _add_attention(model, memory, team, layer)
            _add_mlp(model, memory, team, layer)
        else:
            _add_attention(model, memory, team, layer)
            if model.have_mlp[layer]:
                if model.experts.layers[layer]:
                    call_kernel(model.layer_code[EXPERTS], addresses, layer)
                if model.experts.are_beside or not model.experts.layers[layer]:
                    _compute_inner(model, memory, team, layer)
                    _add_mlp(model, memory, team, layer)
        if model.inputs.width:
            call_kernel(model.layer_code[LAYER_INPUT], addresses, layer)
    if halves.end == 2 * len(model.norms) and (len(adapted.runs) > 0 or model.family.sandwich):
        finish_phase(team, DOWN)  # threads of other ranks may still add to their rows of the residual
    end_products(operand)


@jit
def _write_kv(model: ModelConstants, memory: ThreadMemory, step: StepBatch, team: Team, layer: int) -> None:
    """Compute queries, and write keys and values. From here to `_add_mlp`, between two barriers that follow each other,
    a thread reads and writes its own rows of the residual only.
    """
    acts, operand, cache, adapted = memory.acts, memory.operand, model.cache, memory.adapted
    attending, place = attending_of(model, memory, step, layer), place_of(model, layer)
    weights, part = model.weights, Part(team.thread, team.num_threads)
    rows = share_of(len(acts.residual), team.number, team.num_all)
    own_rows = share_of(len(acts.residual), team.thread, team.num_threads)
    qkv, family = matrices_of(model, layer).qkv, model.family
    put_inputs(model, memory, rows, layer, QKV_SITE, qkv)
    finish_phase(team, NORM)
    product(operand, weights, qkv, Target(acts.qkv, STORE), part)
    finish_own_phase(team, QKV)
    expand(adapted, layer, QKV_SITE, acts.qkv, own_rows)
    if family.clip_qkv > 0:
        clip_rows(acts.qkv, family.clip_qkv, own_rows)
    if len(acts.squares):
        sum_squares(acts.qkv, attending.shape, acts.own_squares, own_rows)
        if team.num_all > team.num_threads:
            finish_phase(team, QKV)
    of_heads = model.head_norms[layer][: model.num_head_norms[layer]]
    norms = HeadNorms(
        of_heads, family.norms_values, model.eps, family.centred_heads, family.norms_rotated, acts.squares
    )
    rotate_and_store(acts.queries.rows, norms, attending, cache, place, model.ropes[layer], own_rows)
    finish_own_phase(team, STORE_KV)
    publish_rows(team.share, team.thread, layer)


@jit
def _attend(model: ModelConstants, memory: ThreadMemory, step: StepBatch, team: Team, layer: int) -> None:
    """Compute attention of the queries."""
    attending, place = attending_of(model, memory, step, layer), place_of(model, layer)
    window, cache, part = window_of(model, layer), model.cache, Part(team.thread, team.num_threads)
    wait_for_earlier_rows(team.share, layer)
    attend(attending, cache, place, window, part)
    if has_splits(attending.batch, window):
        finish_own_phase(team, ATTENTION)
        join(attending, place, window, part)
    finish_phase(team, ATTENTION)


@jit
def _add_attention(model: ModelConstants, memory: ThreadMemory, team: Team, layer: int) -> None:
    """Add the results of attention and of a recurrence to the residual."""
    acts, operand, adapted = memory.acts, memory.operand, memory.adapted
    rows, matrices = share_of(len(acts.residual), team.number, team.num_all), matrices_of(model, layer)
    if model.have_attention[layer]:
        if model.family.gates_attention:
            _gate_results(acts.attended, acts.qkv, rows)
        if model.sub_norms.shape[1]:
            put_normed(acts.attended, Norm(model.sub_norms[layer, 0], model.eps), acts.attended, rows)
        put_rows(acts.attended, model.widths[layer, 0], model.weights, matrices.output, operand, rows)
        shrink(adapted, layer, OUTPUT_SITE, acts.attended, model.widths[layer, 0], rows)
        finish_phase(team, QUANTISE)
        _add_product(model, memory, team, matrices.output)
        finish_phase(team, OUTPUT)
        _end_branch(model, memory, rows, layer, OUTPUT_SITE)
    if model.are_recurrent[layer]:
        put_rows(acts.recurred, acts.recurred.shape[1], model.weights, matrices.recurrent_out, operand, rows)
        shrink(adapted, layer, RECURRENT_OUT_SITE, acts.recurred, acts.recurred.shape[1], rows)
        finish_phase(team, QUANTISE)
        _add_product(model, memory, team, matrices.recurrent_out)
        finish_phase(team, OUTPUT)
        _end_branch(model, memory, rows, layer, RECURRENT_OUT_SITE)


@jit
def _gate_results(attended: Floats, qkv: Floats, rows: Range) -> None:
    """Multiply attention's results by the sigmoid of the gates, the last columns of qkv."""
    width, step = attended.shape[1], qkv.shape[1]
    for r in range(rows.first, rows.end):
        gates = address(qkv) + ((r + 1) * step - width) * FLOAT_BYTES
        gate_row(address(attended) + r * width * FLOAT_BYTES, gates, width // LANES, np.float32(1.0), 0)


@jit
def _compute_inner(model: ModelConstants, memory: ThreadMemory, team: Team, layer: int) -> None:
    """Compute the inner rows of the MLP."""
    acts, operand, adapted = memory.acts, memory.operand, memory.adapted
    family, weights, part = model.family, model.weights, Part(team.thread, team.num_threads)
    rows, gate_up = share_of(len(acts.residual), team.number, team.num_all), matrices_of(model, layer).gate_up
    is_gated_at_once = _is_gated_at_once(family, memory, layer)
    put_inputs(model, memory, rows, layer, GATE_UP_SITE, gate_up)
    finish_phase(team, NORM)
    if is_gated_at_once or not family.gated:
        product(operand, weights, gate_up, Target(acts.own_inner, GATE if is_gated_at_once else STORE), part)
    else:
        product(operand, weights, gate_up, Target(acts.own_gate_up, STORE), part)
    finish_phase(team, GATE_UP)
    if not family.gated:
        expand(adapted, layer, GATE_UP_SITE, acts.inner, rows)
        activate_rows(acts.inner, family.activation, model.activation[layer], rows)
    elif not is_gated_at_once:
        expand(adapted, layer, GATE_UP_SITE, acts.gate_up, rows)
        gate_rows(acts.gate_up, acts.inner, family.activation, family.gate_factor, family.inner_factor, rows)


@jit
def _add_mlp(model: ModelConstants, memory: ThreadMemory, team: Team, layer: int) -> None:
    """Add the MLP's result to the residual."""
    acts, operand, adapted = memory.acts, memory.operand, memory.adapted
    rows, down = share_of(len(acts.residual), team.number, team.num_all), matrices_of(model, layer).down
    if model.sub_norms.shape[1]:
        put_normed(acts.inner, Norm(model.sub_norms[layer, 1], model.eps), acts.inner, rows)
    put_rows(acts.inner, model.widths[layer, 1], model.weights, down, operand, rows)
    shrink(adapted, layer, DOWN_SITE, acts.inner, model.widths[layer, 1], rows)
    finish_phase(team, QUANTISE)
    _add_product(model, memory, team, down)
    finish_phase(team, DOWN)
    _end_branch(model, memory, rows, layer, DOWN_SITE)


@jit
def _is_gated_at_once(family: Family, memory: ThreadMemory, layer: int) -> bool:
    """True if the product of gate and up itself ends with silu(gate) * up."""
    is_plain = family.gated and family.activation == SILU and family.gate_factor == 1 and family.inner_factor == 1
    return is_plain and not changes_site(memory.adapted, layer, GATE_UP_SITE)


@jit
def _add_product(model: ModelConstants, memory: ThreadMemory, team: Team, matrix: int) -> None:
    """Multiply, and add to the residual; in a sandwich, store."""
    acts, part = memory.acts, Part(team.thread, team.num_threads)
    if model.family.sandwich:
        product(memory.operand, model.weights, matrix, Target(acts.own_branch, STORE), part)
    else:
        product(memory.operand, model.weights, matrix, Target(acts.own_residual, ADD), part)


@jit
def _end_branch(model: ModelConstants, memory: ThreadMemory, rows: Range, layer: int, site: int) -> None:
    """After `_add_product` and a barrier: apply adapters, and the norms of a sandwich."""
    acts, adapted = memory.acts, memory.adapted
    if model.family.sandwich:
        expand(adapted, layer, site, acts.branch, rows)
        is_attention = site in (OUTPUT_SITE, RECURRENT_OUT_SITE)
        if not is_attention and model.experts.are_beside:
            put_normed(acts.branch, Norm(model.norms[layer, MLP_ONLY_NORM], model.eps), acts.branch, rows)
            add_rows(acts.routed.normed, acts.branch, rows)
        norm = Norm(model.norms[layer, ATTENTION_OUT_NORM if is_attention else MLP_OUT_NORM], model.eps)
        scale = _ONE if is_attention or model.inputs.width else model.scalars[layer]
        add_normed(acts.branch, norm, scale, acts.residual, rows)
    else:
        expand(adapted, layer, site, acts.residual, rows)


@Kernel
def output_rows(kinds: Kinds, addresses: Addresses, _: Range) -> None:
    """Compute logits from rows of the residual, and summarise them. Every thread of every rank runs this kernel, on
    ModelConstants, Operand, OutputRows and Team.
    """
    model, operand, rows, team = load(kinds, addresses)
    weights, hidden = model.output, rows.hidden
    own = share_of(len(hidden), team.number, team.num_all)
    begin_products(operand)
    start_phases(team.phase_cycles)
    norm = Norm(model.final_norm, model.eps)
    norm_rows(hidden, norm, weights, 0, operand, own)
    wait(team.all_counter, team.num_all)
    product(operand, weights, 0, Target(rows.own_logits, STORE), Part(team.thread, team.num_threads))
    wait(team.all_counter, team.num_all)
    _finish_logits(rows, own)
    finish_phase(team, LOGITS)
    end_products(operand)


@jit
def _finish_logits(rows: OutputRows, own: Range) -> None:
    """Scale, cap and summarise the logits of the rows in the range. Columns behind the last one become minus
    infinity.
    """
    logits, summaries = rows.logits, rows.summaries
    width = logits.shape[1]
    for row in range(own.first, own.end):
        values = address(logits) + row * width * FLOAT_BYTES
        if rows.softcap > 0:
            cap_row(values, width // LANES, rows.scale, rows.softcap)
        elif rows.scale != 1:
            for column in range(rows.num_columns):
                logits[row, column] *= rows.scale
        for column in range(rows.num_columns, width):
            logits[row, column] = -np.inf
        best = index_of_largest(values, width // LANES)
        highest = read_float(values + best * FLOAT_BYTES)
        summaries.largest[row] = min(best, rows.num_columns - 1)  # in a row of NaN, any column
        summaries.normalisers[row] = np.log(sum_of_exponents(values, width // LANES, highest)) + highest
        summaries.highest[row] = highest
