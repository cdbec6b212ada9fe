"""Limits and norms of a token's queries, keys and values, between their product and rotary positions."""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.arguments import Floats, HeadShape, Range
from engine.kernels.cpu.compilation.compiler import jit


class HeadNorms(NamedTuple):
    """The parameters of the norms of queries and keys: root-mean-square norms, or layer norms without biases.

    `squares` is for norms of all queries of a token, and of all its keys: sums of squares of the heads of all ranks, of
    each key/value head its queries' sums, then the key's.
    """

    weight: Floats  # [2, head_dim], of queries and of keys, or [num_heads + num_kv_heads, ..]; [0, ..] without norms
    values: bool  # values are normed, too: weight is [3, head_dim] or wider
    eps: np.float32
    centred: bool  # layer norms
    rotated: bool  # rotated heads are normed
    squares: Floats  # [num_tokens, num_heads + num_kv_heads]; [0, ..] if each head is normed by itself


@jit
def clip_rows(x: Floats, limit: np.float32, own: Range) -> None:
    """Limit the magnitude of the numbers in the rows of x [rows, width]."""
    for r in range(own.first, own.end):
        for i in range(x.shape[1]):
            x[r, i] = min(max(x[r, i], -limit), limit)


@jit
def sum_squares(qkv: Floats, shape: HeadShape, out: Floats, own: Range) -> None:
    """Write the sums of squares of the rows' heads. out: HeadNorms.squares, from the rank's first head on."""
    dim, num_heads = shape.head_dim, shape.num_heads
    ratio = num_heads // shape.num_kv_heads
    for r in range(own.first, own.end):
        for head in range(num_heads + shape.num_kv_heads):
            group, place = (head // ratio, head % ratio) if head < num_heads else (head - num_heads, ratio)
            out[r, group * (ratio + 1) + place] = _squares_of(qkv[r, head * dim : (head + 1) * dim])


@jit
def norm_heads(heads: Floats, norms: HeadNorms, shape: HeadShape, row: int) -> None:
    """Norm the heads of one row in place: queries, or queries and keys, or both and values: flat [heads, head_dim]."""
    dim, num_heads = shape.head_dim, shape.num_heads
    together, have_own = len(norms.squares) > 0, len(norms.weight) > 2 and not norms.values
    query_factor = key_factor = np.float32(1.0)
    if together:
        query_factor, key_factor = _common_factors(norms.squares[row], shape, norms.eps)
    for number in range(len(heads) // dim):
        head = heads[number * dim : (number + 1) * dim]
        if norms.centred:
            _centre(head)
        if together:
            factor = query_factor if number < num_heads else key_factor
        else:
            factor = np.float32(1.0) / np.sqrt(_squares_of(head) / np.float32(dim) + norms.eps)
        kind = int(number >= num_heads) + int(number >= num_heads + shape.num_kv_heads)
        weight = norms.weight[number if have_own else kind]
        for i in range(dim):
            head[i] *= factor * weight[i]


@jit
def _common_factors(squares: Floats, shape: HeadShape, eps: np.float32) -> tuple[np.float32, np.float32]:
    """By which a row's queries and its keys are multiplied. Sums run over heads in order, whichever rank has them."""
    ratio = shape.num_heads // shape.num_kv_heads
    queries = keys = np.float32(0.0)
    for first in range(0, len(squares), ratio + 1):
        for i in range(first, first + ratio):
            queries += squares[i]
        keys += squares[first + ratio]
    width = np.float32(len(squares) // (ratio + 1) * shape.head_dim)
    one = np.float32(1.0)
    return one / np.sqrt(queries / (width * np.float32(ratio)) + eps), one / np.sqrt(keys / width + eps)


@jit
def _squares_of(head: Floats) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(head)):
        total += head[i] * head[i]
    return total


@jit
def _centre(head: Floats) -> None:
    mean = np.float32(0.0)
    for i in range(len(head)):
        mean += head[i]
    mean /= np.float32(len(head))
    for i in range(len(head)):
        head[i] -= mean
