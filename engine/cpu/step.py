"""All layers of a decoder for one step's tokens, as one compiled loop."""

from typing import Any, NamedTuple

from engine.cpu.attention import attend
from engine.cpu.barrier import meet
from engine.cpu.finish import ADD, GATE, STORE
from engine.cpu.jit import jit
from engine.cpu.laps import ATTENTION, DOWN, GATE_UP, LOGITS, NORM, OUTPUT, PLACE, QKV, QUANTISE, lap, start_laps
from engine.cpu.matmul import Target, begin_products, end_products, product
from engine.cpu.rows import norm_rows, place_heads, put_rows

MATRICES_PER_LAYER = 4


class Model(NamedTuple):
    """What does not change. The matrix after those of all layers is the output matrix."""

    weights: Any
    input_norms: Any  # [num_layers, hidden]
    post_norms: Any  # the same
    final_norm: Any  # [hidden]
    head_norms: Any  # [num_layers, 2, head_dim]: of queries and keys; [num_layers, 0, head_dim] without
    windows: Any  # [num_layers] int64
    eps: Any
    shape: Any  # attention.HeadShape


class Activations(NamedTuple):
    """Between the layers' parts, shared by all threads."""

    residual: Any  # [num_tokens, hidden]
    inner: Any  # [num_tokens, intermediate]
    mixed: Any  # [num_tokens, num_heads * head_dim]
    qkv: Any  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    queries: Any  # attention.Queries over qkv and mixed


class Team(NamedTuple):
    """A thread among those that run the same loop, the counter at which they meet, and the thread's laps."""

    thread: int
    num_threads: int
    counter: Any
    laps: Any


class Work(NamedTuple):
    """A thread's view of a step."""

    acts: Any
    operand: Any
    attending: Any  # attention.Attending
    cache: Any  # flat


@jit
def run_layers(model: Any, work: Any, team: Any, layers: Any) -> None:
    """Layers [layers[0], layers[1]): the residual goes on, KV is written to the cache. Every thread runs it."""
    acts, operand, attending, cache = work
    weights, share = model.weights, (team.thread, team.num_threads)
    span = _span(acts.residual, team)
    begin_products(operand)
    start_laps(team.laps)
    for layer in range(layers[0], layers[1]):
        qkv, output, gate_up, down = _matrices(layer)
        norm_rows(acts.residual, (model.input_norms[layer], model.eps), weights.matrices[qkv, 2], operand, span)
        _meet(team, NORM)
        product(operand, weights, qkv, Target(acts.qkv, STORE), share)
        _meet(team, QKV)
        place_heads(acts.queries.rows, (model.head_norms[layer], model.eps), attending, cache, layer, span)
        _meet(team, PLACE)
        attend(attending, cache, layer, model.windows[layer], share)
        _meet(team, ATTENTION)
        put_rows(acts.mixed, weights.matrices[output, 2], operand, span)
        _meet(team, QUANTISE)
        product(operand, weights, output, Target(acts.residual, ADD), share)
        _meet(team, OUTPUT)
        norm_rows(acts.residual, (model.post_norms[layer], model.eps), weights.matrices[gate_up, 2], operand, span)
        _meet(team, NORM)
        product(operand, weights, gate_up, Target(acts.inner, GATE), share)
        _meet(team, GATE_UP)
        put_rows(acts.inner, weights.matrices[down, 2], operand, span)
        _meet(team, QUANTISE)
        product(operand, weights, down, Target(acts.residual, ADD), share)
        _meet(team, DOWN)
    end_products(operand)


@jit
def _matrices(layer: Any) -> Any:
    at = layer * MATRICES_PER_LAYER
    return at, at + 1, at + 2, at + 3


@jit
def _span(rows: Any, team: Any) -> Any:
    """The thread's rows, where each thread works on rows of its own."""
    return len(rows) * team.thread // team.num_threads, len(rows) * (team.thread + 1) // team.num_threads


@jit
def _meet(team: Any, phase: Any) -> None:
    meet(team.counter, team.num_threads)
    lap(team.laps, phase)


@jit
def output_rows(model: Any, hidden: Any, logits: Any, operand: Any, team: Any) -> None:
    """logits [rows, vocab_size] of rows of the residual. Every thread runs it."""
    weights = model.weights
    matrix = len(weights.matrices) - 1
    begin_products(operand)
    start_laps(team.laps)
    norm_rows(hidden, (model.final_norm, model.eps), weights.matrices[matrix, 2], operand, _span(hidden, team))
    meet(team.counter, team.num_threads)
    product(operand, weights, matrix, Target(logits, STORE), (team.thread, team.num_threads))
    _meet(team, LOGITS)
    end_products(operand)
