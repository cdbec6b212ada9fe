"""A mixture of experts inside the loop over layers (Shazeer et al. 2017): each token's row goes to `top_k` of them.

A thread routes its own rows. Then all threads know which rows each expert has, and rows are copied to the operand of
products expert by expert, so that an expert's matrices are read once for all of its rows, by all threads together. The
results are added to the residual in the order of experts: a row's result does not depend on its batch. An expert that
processes every row, where a model has one, comes after the others; it has an inner width of its own.
"""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.activations import gate_rows
from engine.kernels.cpu.arguments import SILU, Floats, Int64s, Matrix, Part, Range, Weights
from engine.kernels.cpu.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES, PANEL
from engine.kernels.cpu.matmul import Operand, Target, multiply_panel, product
from engine.kernels.cpu.rows import Norm, norm_row, put_row_at
from engine.kernels.cpu.tiles import GATE, STORE, TileProduct
from engine.kernels.cpu.vectors import address, mix_rows, scale_row

_ONE = np.float32(1.0)


class Experts(NamedTuple):
    """The routers of a model and its numbers. Without experts, `layers` is 0 everywhere and the arrays are empty."""

    layers: Int64s  # [num_layers]: 1 if the layer has experts instead of the MLP
    routers: Floats  # [num_layers, panels, hidden, 16]: outputs of the router in panels
    router_biases: Floats  # [num_layers, num_experts]; [num_layers, 0] without
    shared_gates: Floats  # [num_layers, 1, hidden]; [num_layers, 0, hidden]: the shared expert's weight is 1
    num_experts: int
    top_k: int
    width: int  # inner width of an expert
    shared_width: int  # 0: there is no shared expert
    normalised: bool  # weights of a row's experts add up to 1
    activation: int  # of gates: SILU, GELU, GELU_TANH, RELU or CLAMPED_SWIGLU


class RoutedRows(NamedTuple):
    """Buffers of a layer with experts, which all threads share. A copy is a row of one expert: first those that were
    routed, expert by expert, then one of each token for the shared expert.
    """

    normed: Floats  # [num_tokens, hidden]
    scores: Floats  # [num_tokens, experts, padded to whole panels]
    chosen: Int64s  # [num_tokens, top_k]
    weights: Floats  # [num_tokens, top_k + 1]: of the chosen experts, then of the shared one
    gate_up: Floats  # flat: panels of gates and ups of all copies; [0] with SILU
    inner: Floats  # flat: inner rows of all copies
    results: Floats  # [copies, hidden]


class Copies(NamedTuple):
    """Which row each copy is of, and its weight. Expert `e` has the copies [starts[e], starts[e + 1])."""

    starts: Int64s  # [experts + 1], or [experts + 2] with a shared one
    rows: Int64s
    weights: Floats


@jit
def route_rows(experts: Experts, routed: RoutedRows, layer: int, x: Floats, norm: Norm, part: Range) -> None:
    """Norm the rows of x in the range, and choose their experts."""
    width, num_scores = x.shape[1], routed.scores.shape[1]
    if part.first >= part.end:
        return
    for r in range(part.first, part.end):
        at, divisor = address(routed.normed) + r * width * FLOAT_BYTES, norm_row(x[r], norm, routed.normed[r])
        scale_row(at, width // LANES, _ONE / divisor, at)
    rows = Matrix(address(routed.normed) + part.first * width * FLOAT_BYTES, width * FLOAT_BYTES)
    out = address(routed.scores) + part.first * num_scores * FLOAT_BYTES
    for panel in range(num_scores // PANEL):
        number = layer * (num_scores // PANEL) + panel
        router = Matrix(address(experts.routers) + number * width * PANEL * FLOAT_BYTES, 0)
        scores = Matrix(out + panel * PANEL * FLOAT_BYTES, num_scores * FLOAT_BYTES)
        multiply_panel(TileProduct(rows, router, scores), width, part.end - part.first, routed.scores[0, 0])
    for r in range(part.first, part.end):
        _choose(experts, layer, routed.scores[r], routed.chosen[r], routed.weights[r])
        routed.weights[r, experts.top_k] = _shared_weight(experts, layer, routed.normed[r])


@jit
def _choose(experts: Experts, layer: int, scores: Floats, chosen: Int64s, weights: Floats) -> None:
    """The experts with the highest scores, and their shares of the softmax over all experts."""
    for e in range(experts.router_biases.shape[1]):
        scores[e] += experts.router_biases[layer, e]
    peak, total = scores[0], np.float32(0.0)
    for e in range(1, experts.num_experts):
        peak = max(peak, scores[e])
    for e in range(experts.num_experts):
        scores[e] = np.exp(scores[e] - peak)
        total += scores[e]
    if experts.normalised:
        total = np.float32(0.0)
    for i in range(experts.top_k):
        best = 0
        for e in range(1, experts.num_experts):
            if scores[e] > scores[best]:
                best = e
        chosen[i], weights[i] = best, scores[best]
        if experts.normalised:
            total += scores[best]
        scores[best] = -_ONE
    for i in range(experts.top_k):
        weights[i] /= total


@jit
def _shared_weight(experts: Experts, layer: int, x: Floats) -> np.float32:
    if experts.shared_gates.shape[1] == 0:
        return _ONE
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * experts.shared_gates[layer, 0, i]
    return _ONE / (_ONE + np.exp(-total))


@jit
def copies_of(experts: Experts, routed: RoutedRows) -> Copies:
    """Sort all tokens' choices by expert, and by row within an expert. Each thread does it for itself."""
    num_rows, top_k = routed.chosen.shape
    num_experts, has_shared = experts.num_experts, experts.shared_width > 0
    starts = np.zeros(num_experts + 2, np.int64)
    for r in range(num_rows):
        for i in range(top_k):
            starts[routed.chosen[r, i] + 1] += 1
    for e in range(num_experts):
        starts[e + 1] += starts[e]
    num_routed = num_rows * top_k
    starts[num_experts + 1] = num_routed + (num_rows if has_shared else 0)
    rows, weights = np.empty(starts[num_experts + 1], np.int64), np.empty(starts[num_experts + 1], np.float32)
    ends = starts.copy()
    for r in range(num_rows):
        for i in range(top_k):
            expert = routed.chosen[r, i]
            rows[ends[expert]], weights[ends[expert]] = r, routed.weights[r, i]
            ends[expert] += 1
        if has_shared:
            rows[num_routed + r], weights[num_routed + r] = r, routed.weights[r, top_k]
    return Copies(starts, rows, weights)


@jit
def _place(copies: Copies, copy: int, width: int, shared_width: int) -> int:
    """The place of a copy's first number where copies of experts have one width and shared ones another."""
    num_routed = copies.starts[-2]
    if copy <= num_routed:
        return copy * width
    return num_routed * width + (copy - num_routed) * shared_width


@jit
def put_copies(
    experts: Experts, routed: RoutedRows, copies: Copies, weights: Weights, first: int, operand: Operand, part: Range
) -> None:
    """Write the copies in the range to the operand of their experts' first products. `first`: number of the first
    expert's first matrix; those of an expert follow each other.
    """
    for e in range(len(copies.starts) - 1):
        for copy in range(max(part.first, copies.starts[e]), min(part.end, copies.starts[e + 1])):
            matrix = first + 2 * e
            at = copy * weights.matrices[matrix, 2]
            row = routed.normed[copies.rows[copy]]
            operand.factors[copy] = put_row_at(row, weights, matrix, operand.a, at)


@jit
def multiply_up(
    experts: Experts, routed: RoutedRows, copies: Copies, weights: Weights, first: int, operand: Operand, part: Part
) -> None:
    """Compute the inner rows of all copies, or their gates and ups: one thread's part of the columns."""
    for e in range(len(copies.starts) - 1):
        begin, end = copies.starts[e], copies.starts[e + 1]
        if begin == end:
            continue
        width = experts.width if e < experts.num_experts else experts.shared_width
        at = _place(copies, begin, experts.width, experts.shared_width)
        matrix, count = first + 2 * e, end - begin
        own = _from(operand, begin * weights.matrices[matrix, 2], begin)
        if experts.activation == SILU:
            out = routed.inner[at : at + count * width].reshape(count, width)
            product(own, weights, matrix, Target(out, GATE), part)
        else:
            out = routed.gate_up[2 * at : 2 * (at + count * width)].reshape(count, 2 * width)
            product(own, weights, matrix, Target(out, STORE), part)


@jit
def put_inner(
    experts: Experts, routed: RoutedRows, copies: Copies, weights: Weights, first: int, operand: Operand, part: Range
) -> None:
    """Write the inner rows of the copies in the range, which may have to be gated first, to the operand of their
    experts' second products.
    """
    for e in range(len(copies.starts) - 1):
        matrix, width = first + 2 * e + 1, experts.width if e < experts.num_experts else experts.shared_width
        for copy in range(max(part.first, copies.starts[e]), min(part.end, copies.starts[e + 1])):
            at = _place(copies, copy, experts.width, experts.shared_width)
            row, place = routed.inner[at : at + width], _place_of_inner(copies, copy, weights, first, experts)
            if experts.activation != SILU:
                gate_up = routed.gate_up[2 * at : 2 * (at + width)].reshape(1, 2 * width)
                gate_rows(gate_up, row.reshape(1, width), experts.activation, Range(0, 1))
            operand.factors[copy] = put_row_at(row, weights, matrix, operand.a, place)


@jit
def _place_of_inner(copies: Copies, copy: int, weights: Weights, first: int, experts: Experts) -> int:
    shared = first + 2 * experts.num_experts + 1
    depth = weights.matrices[first + 1, 2]
    return _place(copies, copy, depth, weights.matrices[shared, 2] if experts.shared_width else depth)


@jit
def multiply_down(
    experts: Experts, routed: RoutedRows, copies: Copies, weights: Weights, first: int, operand: Operand, part: Part
) -> None:
    """Compute the results of all copies: one thread's part of the columns."""
    for e in range(len(copies.starts) - 1):
        begin, end = copies.starts[e], copies.starts[e + 1]
        if begin < end:
            own = _from(operand, _place_of_inner(copies, begin, weights, first, experts), begin)
            product(own, weights, first + 2 * e + 1, Target(routed.results[begin:end], STORE), part)


@jit
def _from(operand: Operand, element: int, row: int) -> Operand:
    """The operand from a row on, which begins with this element."""
    return Operand(operand.a[element:], operand.factors[row:], operand.sums, operand.amx, operand.wide)


@jit
def add_results(routed: RoutedRows, copies: Copies, out: Floats, part: Range) -> None:
    """Add the weighted results to the rows of `out` in the range."""
    width = out.shape[1]
    for copy in range(len(copies.rows)):
        row = copies.rows[copy]
        if part.first <= row < part.end:
            result = address(routed.results) + copy * width * FLOAT_BYTES
            mix_rows(result, width // LANES, copies.weights[copy], _ONE, address(out) + row * width * FLOAT_BYTES)
