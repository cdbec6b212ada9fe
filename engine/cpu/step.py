"""All layers of a decoder for one step's tokens, as one compiled loop."""

from typing import Any, NamedTuple

from engine.cpu.attention import attend
from engine.cpu.barrier import meet
from engine.cpu.jit import jit
from engine.cpu.matmul import add_product, begin_products, end_products, gated_product, product
from engine.cpu.rows import norm_rows, place_heads, put_rows

QKV, O, GATE_UP, DOWN = range(4)
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


@jit
def run_layers(model: Any, batch: Any, cache: Any, acts: Any, operand: Any, scratch: Any, team: Any, layers: Any) -> None:
    """Layers [layers[0], layers[1]): the residual goes on, KV is written to the cache. Run by every thread of the team.

    team: (index, count) of this thread and the barrier they share.
    """
    share, barrier = (team[0], team[1]), team[2]
    num_rows = acts.residual.shape[0]
    first, end = num_rows * share[0] // share[1], num_rows * (share[0] + 1) // share[1]
    weights, shape = model.weights, model.shape
    begin_products(operand)
    for layer in range(layers[0], layers[1]):
        at = layer * MATRICES_PER_LAYER
        norm_rows(acts.residual, model.input_norms[layer], model.eps, weights.matrices[at + QKV, 2], operand, first, end)
        meet(barrier, share[1])
        product(operand, num_rows, weights, at + QKV, acts.qkv, share)
        meet(barrier, share[1])
        place_heads(acts.queries.queries, model.head_norms[layer], model.eps, batch, cache, shape, layer, (first, end))
        meet(barrier, share[1])
        attend(acts.queries, cache, layer, model.windows[layer], shape, batch, scratch, share)
        meet(barrier, share[1])
        put_rows(acts.mixed, weights.matrices[at + O, 2], operand, first, end)
        meet(barrier, share[1])
        add_product(operand, num_rows, weights, at + O, acts.residual, share)
        meet(barrier, share[1])
        norm_rows(acts.residual, model.post_norms[layer], model.eps, weights.matrices[at + GATE_UP, 2], operand, first, end)
        meet(barrier, share[1])
        gated_product(operand, num_rows, weights, at + GATE_UP, acts.inner, share)
        meet(barrier, share[1])
        put_rows(acts.inner, weights.matrices[at + DOWN, 2], operand, first, end)
        meet(barrier, share[1])
        add_product(operand, num_rows, weights, at + DOWN, acts.residual, share)
        meet(barrier, share[1])
    end_products(operand)


@jit
def output_rows(model: Any, hidden: Any, logits: Any, operand: Any, team: Any) -> None:
    """logits [rows, vocab_size] of rows of the residual."""
    share, barrier = (team[0], team[1]), team[2]
    num_rows = hidden.shape[0]
    first, end = num_rows * share[0] // share[1], num_rows * (share[0] + 1) // share[1]
    weights = model.weights
    matrix = len(weights.matrices) - 1
    begin_products(operand)
    norm_rows(hidden, model.final_norm, model.eps, weights.matrices[matrix, 2], operand, first, end)
    meet(barrier, share[1])
    product(operand, num_rows, weights, matrix, logits, share)
    meet(barrier, share[1])
    end_products(operand)
