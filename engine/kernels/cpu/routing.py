"""The choice of experts, as in engine/models/routing.py. A thread routes its own rows."""

import numpy as np

from engine.kernels.cpu.activations import sigmoid
from engine.kernels.cpu.arguments import SIGMOID, SPARSE_MIXER, Floats, Int64s, Matrix, Range, RoutedRows, Routing
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, PANEL
from engine.kernels.cpu.products.panels import multiply_panel
from engine.kernels.cpu.products.tiles import TileProduct
from engine.kernels.cpu.rows import Norm, put_normed
from engine.kernels.cpu.vectors import address

_ONE = np.float32(1.0)
_LOWEST = np.finfo(np.float32).min
"""Of experts that are chosen already; compiled code must not meet infinities."""


@jit
def route_rows(routing: Routing, routed: RoutedRows, layer: int, x: Floats, norm: Norm, own: Range) -> None:
    """Norm the rows of x in the range, and choose their experts."""
    width, num_scores = x.shape[1], routed.scores.shape[1]
    if own.first >= own.end:
        return
    put_normed(x, norm, routed.normed, own)
    rows = Matrix(address(routed.normed) + own.first * width * FLOAT_BYTES, width * FLOAT_BYTES)
    out = address(routed.scores) + own.first * num_scores * FLOAT_BYTES
    for panel in range(num_scores // PANEL):
        number = layer * (num_scores // PANEL) + panel
        router = Matrix(address(routing.routers) + number * width * PANEL * FLOAT_BYTES, 0)
        scores = Matrix(out + panel * PANEL * FLOAT_BYTES, num_scores * FLOAT_BYTES)
        multiply_panel(TileProduct(rows, router, scores), width, own.end - own.first, routed.scores[0, 0])
    ranked = np.empty(routing.num_experts, np.float32)
    for r in range(own.first, own.end):
        for e in range(routing.router_biases.shape[1]):
            routed.scores[r, e] += routing.router_biases[layer, e]
        if routing.scoring == SPARSE_MIXER:
            _mix_sparsely(routing, routed.scores[r], ranked, routed.chosen[r], routed.weights[r])
        else:
            _choose(routing, layer, routed.scores[r], ranked, routed.chosen[r], routed.weights[r])
        if routing.expert_factors.shape[1]:
            for i in range(routing.top_k):
                routed.weights[r, i] *= routing.expert_factors[layer, routed.chosen[r, i]]
        routed.weights[r, routing.top_k] = _shared_weight(routing, layer, routed.normed[r])


@jit
def _choose(routing: Routing, layer: int, scores: Floats, ranked: Floats, chosen: Int64s, weights: Floats) -> None:
    """The experts that rank highest, and their shares."""
    has_bias = routing.choice_biases.shape[1] > 0
    for e in range(routing.num_experts):
        ranked[e] = scores[e]  # outputs rank better than scores, many of which round to 1
        if has_bias and routing.biases_outputs:
            ranked[e] += routing.choice_biases[layer, e]
    total = _score(routing, scores)
    if not routing.biases_outputs and (has_bias or routing.num_groups > 1):
        for e in range(routing.num_experts):
            ranked[e] = scores[e] / total + routing.choice_biases[layer, e] if has_bias else scores[e]
    if routing.num_groups > 1:
        _drop_lower_groups(routing, ranked)
    if routing.normalised:
        total = routing.share_floor
    for i in range(routing.top_k):
        best = _highest(ranked, 0, routing.num_experts)
        ranked[best] = _LOWEST
        chosen[i], weights[i] = best, scores[best]
        if routing.normalised:
            total += scores[best]
    for i in range(routing.top_k):
        weights[i] = weights[i] / total * routing.routed_scale


@jit
def _score(routing: Routing, scores: Floats) -> np.float32:
    """Turn a router's outputs into scores, and return what divides them."""
    if routing.scoring == SIGMOID:
        for e in range(routing.num_experts):
            scores[e] = sigmoid(scores[e])
        return _ONE
    peak, total = scores[0], np.float32(0.0)
    for e in range(1, routing.num_experts):
        peak = max(peak, scores[e])
    for e in range(routing.num_experts):
        scores[e] = np.exp(scores[e] - peak)
        total += scores[e]
    return total


@jit
def _highest(values: Floats, first: int, end: int) -> int:
    best = first
    for i in range(first + 1, end):
        if values[i] > values[best]:
            best = i
    return best


@jit
def _drop_lower_groups(routing: Routing, ranked: Floats) -> None:
    """Rank experts last unless their group is one of the best."""
    size = routing.num_experts // routing.num_groups
    sums, kept = np.zeros(routing.num_groups, np.float32), np.zeros(routing.num_groups, np.bool_)
    rest = ranked.copy()
    for group in range(routing.num_groups):
        for _ in range(routing.group_best):
            best = _highest(rest, group * size, (group + 1) * size)
            sums[group] += rest[best]
            rest[best] = _LOWEST
    for _ in range(routing.top_groups):
        best = _highest(sums, 0, routing.num_groups)
        kept[best], sums[best] = True, _LOWEST
    for e in range(routing.num_experts):
        if not kept[e // size]:
            ranked[e] = _LOWEST


@jit
def _mix_sparsely(routing: Routing, scores: Floats, left: Floats, chosen: Int64s, weights: Floats) -> None:
    """SparseMixer: the highest of the experts that are left, and its share among those close to it."""
    for e in range(routing.num_experts):
        left[e] = scores[e]
    for i in range(routing.top_k):
        best = _highest(left, 0, routing.num_experts)
        peak, total = left[best], np.float32(0.0)
        for e in range(routing.num_experts):
            is_far = peak - scores[e] > routing.mixer_range * max(abs(scores[e]), peak)
            if left[e] > _LOWEST and not is_far:
                total += np.exp(left[e] - peak)
        chosen[i], weights[i], left[best] = best, _ONE / total, _LOWEST


@jit
def _shared_weight(routing: Routing, layer: int, x: Floats) -> np.float32:
    if routing.shared_gates.shape[1] == 0:
        return _ONE
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * routing.shared_gates[layer, 0, i]
    return sigmoid(total)
