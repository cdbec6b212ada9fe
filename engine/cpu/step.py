"""All layers of a decoder for one step's tokens, as one compiled loop."""

from typing import Any, NamedTuple

from engine.cpu.attention import attend
from engine.cpu.barrier import meet
from engine.cpu.jit import jit
from engine.cpu.laps import ATTENTION, DOWN, GATE_UP, LOGITS, NORM, OUTPUT, PLACE, QKV, QUANTISE, lap, start_laps
from engine.cpu.matmul import begin_products, end_products, gated_product, product
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
    """A thread among those that run the same loop: its index, their count, the counter at which they meet, its laps."""

    index: int
    count: int
    counter: Any
    laps: Any


@jit
def run_layers(model: Any, batch: Any, cache: Any, acts: Any, operand: Any, scratch: Any, team: Any, layers: Any) -> None:
    """Layers [layers[0], layers[1]): the residual goes on, KV is written to the cache. Run by every thread of the team."""
    share, rows, laps = (team.index, team.count), acts.residual.shape[0], team.laps
    first, end = rows * team.index // team.count, rows * (team.index + 1) // team.count
    weights, shape = model.weights, model.shape
    begin_products(operand)
    start_laps(laps)
    for layer in range(layers[0], layers[1]):
        qkv, output, gate_up, down = _matrices(layer)
        norm_rows(acts.residual, model.input_norms[layer], model.eps, weights.matrices[qkv, 2], operand, first, end)
        _meet(team, NORM)
        product(operand, rows, weights, qkv, acts.qkv, False, share)
        _meet(team, QKV)
        place_heads(acts.queries.queries, model.head_norms[layer], model.eps, batch, cache, shape, layer, (first, end))
        _meet(team, PLACE)
        attend(acts.queries, cache, layer, model.windows[layer], shape, batch, scratch, share)
        _meet(team, ATTENTION)
        put_rows(acts.mixed, weights.matrices[output, 2], operand, first, end)
        _meet(team, QUANTISE)
        product(operand, rows, weights, output, acts.residual, True, share)
        _meet(team, OUTPUT)
        norm_rows(acts.residual, model.post_norms[layer], model.eps, weights.matrices[gate_up, 2], operand, first, end)
        _meet(team, NORM)
        gated_product(operand, rows, weights, gate_up, acts.inner, share)
        _meet(team, GATE_UP)
        put_rows(acts.inner, weights.matrices[down, 2], operand, first, end)
        _meet(team, QUANTISE)
        product(operand, rows, weights, down, acts.residual, True, share)
        _meet(team, DOWN)
    end_products(operand)


@jit
def _matrices(layer: int) -> Any:
    at = layer * MATRICES_PER_LAYER
    return at, at + 1, at + 2, at + 3


@jit
def _meet(team: Any, phase: int) -> None:
    meet(team.counter, team.count)
    lap(team.laps, phase)


@jit
def output_rows(model: Any, hidden: Any, logits: Any, operand: Any, team: Any) -> None:
    """logits [rows, vocab_size] of rows of the residual."""
    rows, weights = hidden.shape[0], model.weights
    first, end = rows * team.index // team.count, rows * (team.index + 1) // team.count
    matrix = len(weights.matrices) - 1
    begin_products(operand)
    start_laps(team.laps)
    norm_rows(hidden, model.final_norm, model.eps, weights.matrices[matrix, 2], operand, first, end)
    meet(team.counter, team.count)
    product(operand, rows, weights, matrix, logits, False, (team.index, team.count))
    _meet(team, LOGITS)
    end_products(operand)
