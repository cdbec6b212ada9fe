"""All layers of a decoder for one step's tokens, as one compiled loop that counts the CPU cycles of its phases.

The threads of one process run it together, or those of several: the ranks of a stage, each with some of the heads and
some of the columns of every matrix. All of them share the activations, so that each column is a sum over all inputs in
the same order: the results do not depend on the number of ranks, to the bit.
"""

import time
from typing import NamedTuple

import numpy as np
from numba import types

from engine.kernels.cpu.adapters import (
    DOWN_SITE,
    GATE_UP_SITE,
    OUTPUT_SITE,
    QKV_SITE,
    StepAdapters,
    changes_site,
    expand,
    gate_rows,
    norm_and_shrink,
    shrink,
)
from engine.kernels.cpu.arguments import Attending, Cache, Floats, HeadShape, Int64s, Part, Queries, Range, Weights
from engine.kernels.cpu.attention import attend, has_splits, join
from engine.kernels.cpu.barrier import wait
from engine.kernels.cpu.compiler import (
    INT64,
    Builder,
    CodeContext,
    Emitter,
    Intrinsic,
    Signature,
    TypingContext,
    Value,
    Values,
    emitted,
    jit,
)
from engine.kernels.cpu.matmul import Operand, Target, begin_products, end_products, product
from engine.kernels.cpu.rows import Norm, norm_rows, put_rows, rotate_and_store
from engine.kernels.cpu.tiles import ADD, GATE, STORE

_MATRICES_PER_LAYER = 4


class Model(NamedTuple):
    """The weights and constants of a model, the same in every step."""

    weights: Weights  # of each layer: qkv, output, gate and up, down
    output: Weights  # the output matrix of the vocabulary; in int8 beside weights in int4
    input_norms: Floats  # [num_layers, hidden]
    post_norms: Floats  # [num_layers, hidden]
    final_norm: Floats  # [hidden]
    head_norms: Floats  # [num_layers, 2, head_dim] of queries and keys; [num_layers, 0, head_dim] without
    windows: Int64s  # [num_layers]
    eps: np.float32
    shape: HeadShape


class Activations(NamedTuple):
    """Intermediate results of a layer. All threads of all ranks share them, except qkv.

    Products write to `own_residual` and `own_inner`. These have the shape of `residual` and `inner`, and begin at the
    first column that the rank computes.
    """

    residual: Floats  # [num_tokens, hidden]
    own_residual: Floats
    inner: Floats  # [num_tokens, intermediate]
    own_inner: Floats
    mixed: Floats  # [num_tokens, num_heads * head_dim], the heads of all ranks
    qkv: Floats  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], the rank's heads
    queries: Queries  # over qkv and the rank's part of mixed


class Team(NamedTuple):
    """One of the threads that run the same loop: among its rank's threads, and among those of all ranks."""

    thread: int
    num_threads: int
    counter: Int64s  # [1], of the barrier of the rank's threads
    number: int
    num_all: int
    all_counter: Int64s  # [1], of the barrier of all threads
    phase_cycles: Int64s  # of this thread; see start_phases


class Work(NamedTuple):
    """One thread's arguments of a step."""

    acts: Activations
    operand: Operand
    attending: Attending
    cache: Cache
    adapted: StepAdapters


class _Matrices(NamedTuple):
    """Numbers of a layer's matrices in `Weights`."""

    qkv: int
    output: int
    gate_up: int
    down: int


@jit
def run_layers(model: Model, work: Work, team: Team, layers: Range) -> None:
    """Compute a range of layers: update the residual and write KV to the cache. Every thread calls this function."""
    acts, operand, attending, cache, adapted = work
    weights, part = model.weights, Part(team.thread, team.num_threads)
    rows = _rows_of(len(acts.residual), team.number, team.num_all)
    own_rows = _rows_of(len(acts.residual), team.thread, team.num_threads)
    begin_products(operand)
    start_phases(team.phase_cycles)
    for layer in range(layers.first, layers.end):
        qkv, output, _, _ = _matrices(layer)
        input_norm = Norm(model.input_norms[layer], model.eps)
        norm_rows(acts.residual, input_norm, weights.matrices[qkv], operand, rows)
        norm_and_shrink(adapted, layer, QKV_SITE, acts.residual, input_norm, rows)
        _finish_phase(team, NORM)
        product(operand, weights, qkv, Target(acts.qkv, STORE), part)
        _finish_own_phase(team, QKV)
        expand(adapted, layer, QKV_SITE, acts.qkv, own_rows)
        rotate_and_store(acts.queries.rows, Norm(model.head_norms[layer], model.eps), attending, cache, layer, own_rows)
        _finish_own_phase(team, STORE_KV)
        attend(attending, cache, layer, model.windows[layer], part)
        if has_splits(attending.batch, model.windows[layer]):
            _finish_own_phase(team, ATTENTION)
            join(attending, model.windows[layer], part)
        _finish_phase(team, ATTENTION)
        put_rows(acts.mixed, weights.matrices[output], operand, rows)
        shrink(adapted, layer, OUTPUT_SITE, acts.mixed, rows)
        _finish_phase(team, QUANTISE)
        product(operand, weights, output, Target(acts.own_residual, ADD), part)
        _finish_phase(team, OUTPUT)
        expand(adapted, layer, OUTPUT_SITE, acts.residual, rows)
        _run_mlp(model, work, team, layer)
    if layers.end == len(model.input_norms) and len(adapted.runs) > 0:
        _finish_phase(team, DOWN)  # threads of other ranks may still add to their rows of the residual
    end_products(operand)


@jit
def _run_mlp(model: Model, work: Work, team: Team, layer: int) -> None:
    """The second half of a layer. Until the next barrier, a thread may read its own rows of the residual only."""
    acts, operand, _, _, adapted = work
    weights, part = model.weights, Part(team.thread, team.num_threads)
    rows = _rows_of(len(acts.residual), team.number, team.num_all)
    _, _, gate_up, down = _matrices(layer)
    post_norm = Norm(model.post_norms[layer], model.eps)
    norm_rows(acts.residual, post_norm, weights.matrices[gate_up], operand, rows)
    norm_and_shrink(adapted, layer, GATE_UP_SITE, acts.residual, post_norm, rows)
    _finish_phase(team, NORM)
    is_gate_changed = changes_site(adapted, layer, GATE_UP_SITE)
    if is_gate_changed:
        product(operand, weights, gate_up, Target(adapted.own_gate_up, STORE), part)
    else:
        product(operand, weights, gate_up, Target(acts.own_inner, GATE), part)
    _finish_phase(team, GATE_UP)
    if is_gate_changed:
        expand(adapted, layer, GATE_UP_SITE, adapted.gate_up, rows)
        gate_rows(adapted, acts.inner, rows)
    put_rows(acts.inner, weights.matrices[down], operand, rows)
    shrink(adapted, layer, DOWN_SITE, acts.inner, rows)
    _finish_phase(team, QUANTISE)
    product(operand, weights, down, Target(acts.own_residual, ADD), part)
    _finish_phase(team, DOWN)
    expand(adapted, layer, DOWN_SITE, acts.residual, rows)


@jit
def _matrices(layer: int) -> _Matrices:
    first = layer * _MATRICES_PER_LAYER
    return _Matrices(first, first + 1, first + 2, first + 3)


@jit
def _rows_of(num_rows: int, number: int, num_parts: int) -> Range:
    """The rows of thread `number` in phases that share out rows."""
    return Range(num_rows * number // num_parts, num_rows * (number + 1) // num_parts)


@jit
def _finish_phase(team: Team, phase: int) -> None:
    """Wait for the threads of all ranks, then count the phase's cycles, waiting included."""
    wait(team.all_counter, team.num_all)
    end_phase(team.phase_cycles, phase)


@jit
def _finish_own_phase(team: Team, phase: int) -> None:
    """Wait for the rank's threads only, then count the phase's cycles, waiting included."""
    wait(team.counter, team.num_threads)
    end_phase(team.phase_cycles, phase)


@jit
def output_rows(model: Model, hidden: Floats, logits: Floats, operand: Operand, team: Team) -> None:
    """Compute logits [rows, vocab_size] from rows of the residual. Every thread of every rank calls this function.
    `logits` begins at the first column that the rank computes.
    """
    weights = model.output
    begin_products(operand)
    start_phases(team.phase_cycles)
    norm = Norm(model.final_norm, model.eps)
    norm_rows(hidden, norm, weights.matrices[0], operand, _rows_of(len(hidden), team.number, team.num_all))
    wait(team.all_counter, team.num_all)
    product(operand, weights, 0, Target(logits, STORE), Part(team.thread, team.num_threads))
    _finish_phase(team, LOGITS)
    end_products(operand)


PHASES = ("norm", "qkv", "rotate and store", "attention", "quantise", "output", "gate and up", "down", "logits")
NORM, QKV, STORE_KV, ATTENTION, QUANTISE, OUTPUT, GATE_UP, DOWN, LOGITS = range(len(PHASES))


@emitted
def _cycle_counter(typing: TypingContext) -> Intrinsic:
    """Read the CPU's time-stamp counter (rdtsc)."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        return Emitter(context, builder).call("llvm.readcyclecounter", INT64)

    return types.int64(), generate


@jit
def start_phases(phase_cycles: Int64s) -> None:
    """Begin to count. phase_cycles: [len(PHASES) + 1], cycles of each phase, then the counter at the last end."""
    phase_cycles[-1] = _cycle_counter()


@jit
def end_phase(phase_cycles: Int64s, phase: int) -> None:
    """Add the cycles since the last call of `start_phases` or `end_phase` to this phase."""
    now = _cycle_counter()
    phase_cycles[phase] += now - phase_cycles[-1]
    phase_cycles[-1] = now


@jit
def _now() -> int:
    return _cycle_counter()


def cycles_per_ms(measured_s: float = 0.05) -> float:
    """Rate of the cycle counter, measured by spinning for `measured_s` seconds."""
    cycles, start_s = _now(), time.perf_counter()
    while time.perf_counter() - start_s < measured_s:
        pass
    return float((_now() - cycles) / (time.perf_counter() - start_s) / 1000)
