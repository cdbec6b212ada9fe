"""A mixture of experts inside the loop over layers (Shazeer et al. 2017): each token's row goes to `top_k` of them.

A thread routes its own rows, see `routing.py`. Then all threads know which rows each expert has, and rows are copied to
the operand of products expert by expert, so that an expert's matrices are read once for all of its rows, by all threads
together. The results are added to the residual in the order of experts: a row's result does not depend on its batch. An
expert that processes every row, where a model has one, comes after the others; it has an inner width of its own.
"""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.activations import activate_rows, gate_rows
from engine.kernels.cpu.arguments import (
    DEPTH,
    SILU,
    Floats,
    Int64s,
    Operand,
    Part,
    Range,
    RoutedRows,
    Routing,
    Weights,
)
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES
from engine.kernels.cpu.products.finish import GATE, STORE
from engine.kernels.cpu.products.matmul import Target, product
from engine.kernels.cpu.rows import put_row_at
from engine.kernels.cpu.vectors import address, mix_rows

_ONE = np.float32(1.0)


class Experts(NamedTuple):
    """The experts of a model. Without experts, `layers` is 0 everywhere and the arrays are empty."""

    layers: Int64s  # [num_layers]: 1 if the layer has experts instead of the MLP, or beside it
    routing: Routing
    num_experts: int
    width: int  # inner width of an expert
    shared_width: int  # 0: there is no shared expert
    gated: bool
    activation: int  # a number of arguments.py
    scales_inputs: bool  # copies are weighted before they are multiplied, not the results
    are_beside: bool  # layers have experts and the MLP


class Copies(NamedTuple):
    """The row of each copy, and its weight. Expert `e` has the copies [starts[e], starts[e + 1])."""

    starts: Int64s  # [experts + 1], or [experts + 2] with a shared one
    rows: Int64s
    weights: Floats


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
    experts: Experts, routed: RoutedRows, copies: Copies, weights: Weights, first: int, operand: Operand, own: Range
) -> None:
    """Write the copies in the range to the operand of their experts' first products. `first`: number of the first
    expert's first matrix; those of an expert follow each other.
    """
    for e in range(len(copies.starts) - 1):
        for copy in range(max(own.first, copies.starts[e]), min(own.end, copies.starts[e + 1])):
            matrix = first + 2 * e
            at = copy * weights.matrices[matrix, DEPTH]
            row = routed.normed[copies.rows[copy]]
            factor = put_row_at(row, weights, matrix, operand, at)
            operand.factors[copy] = factor * copies.weights[copy] if experts.scales_inputs else factor


@jit
def multiply_up(
    experts: Experts, routed: RoutedRows, copies: Copies, weights: Weights, first: int, operand: Operand, part: Part
) -> None:
    """Compute the inner rows of all copies, before their activation, or their gates and ups: one thread's part of the
    columns.
    """
    for e in range(len(copies.starts) - 1):
        begin, end = copies.starts[e], copies.starts[e + 1]
        if begin == end:
            continue
        width = experts.width if e < experts.num_experts else experts.shared_width
        at = _place(copies, begin, experts.width, experts.shared_width)
        matrix, count = first + 2 * e, end - begin
        own = _from(operand, begin * weights.matrices[matrix, DEPTH], begin)
        if not experts.gated or experts.activation == SILU:
            out = routed.inner[at : at + count * width].reshape(count, width)
            product(own, weights, matrix, Target(out, GATE if experts.gated else STORE), part)
        else:
            out = routed.gate_up[2 * at : 2 * (at + count * width)].reshape(count, 2 * width)
            product(own, weights, matrix, Target(out, STORE), part)


@jit
def put_inner(
    experts: Experts, routed: RoutedRows, copies: Copies, weights: Weights, first: int, operand: Operand, own: Range
) -> None:
    """Write the inner rows of the copies in the range, which may have to be gated or activated first, to the operand of
    their experts' second products.
    """
    for e in range(len(copies.starts) - 1):
        matrix, width = first + 2 * e + 1, experts.width if e < experts.num_experts else experts.shared_width
        for copy in range(max(own.first, copies.starts[e]), min(own.end, copies.starts[e + 1])):
            at = _place(copies, copy, experts.width, experts.shared_width)
            row, place = routed.inner[at : at + width], _place_of_inner(copies, copy, weights, first, experts)
            if not experts.gated:
                activate_rows(row.reshape(1, width), experts.activation, row, Range(0, 1))
            elif experts.activation != SILU:
                gate_up = routed.gate_up[2 * at : 2 * (at + width)].reshape(1, 2 * width)
                gate_rows(gate_up, row.reshape(1, width), experts.activation, _ONE, _ONE, Range(0, 1))
            operand.factors[copy] = put_row_at(row, weights, matrix, operand, place)


@jit
def _place_of_inner(copies: Copies, copy: int, weights: Weights, first: int, experts: Experts) -> int:
    shared = first + 2 * experts.num_experts + 1
    depth = weights.matrices[first + 1, DEPTH]
    return _place(copies, copy, depth, weights.matrices[shared, DEPTH] if experts.shared_width else depth)


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
    a = operand.a[element * operand.code.operand_bytes :]
    return Operand(a, operand.factors[row:], operand.sums, operand.amx, operand.code, operand.wide)


@jit
def add_results(experts: Experts, routed: RoutedRows, copies: Copies, out: Floats, own: Range) -> None:
    """Add the results, weighted unless their inputs were, to the rows of `out` in the range."""
    width = out.shape[1]
    for copy in range(len(copies.rows)):
        row = copies.rows[copy]
        if own.first <= row < own.end:
            result = address(routed.results) + copy * width * FLOAT_BYTES
            weight = _ONE if experts.scales_inputs else copies.weights[copy]
            mix_rows(result, width // LANES, weight, _ONE, address(out) + row * width * FLOAT_BYTES)
