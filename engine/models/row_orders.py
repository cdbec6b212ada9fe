"""Orders of the rows of stored tensors that the decoder expects in another order."""

import numpy as np
from numpy.typing import NDArray

from engine.models.recurrent.config import RecurrentConfig


def rotary_order(head_dim: int, dim: int, *, interleaved: bool, swapped: bool = False) -> list[int]:
    """The order of a stored head's dimensions that `engine.models.rope.rotate` expects.

    The first `dim` stored dimensions are rotated; `interleaved` pairs 2i with 2i + 1, else i with i + dim / 2.
    If `swapped`, the second of a pair comes first.
    """
    if interleaved:
        first, second = list(range(0, dim, 2)), list(range(1, dim, 2))
    else:
        first, second = list(range(dim // 2)), list(range(dim // 2, dim))
    if swapped:
        first, second = second, first
    middle = dim + (head_dim - dim) // 2
    return [*first, *range(dim, middle), *second, *range(middle, head_dim)]


def heads_of_one_tensor(heads: int, kv_heads: int, *, is_grouped: bool, num_parts: int) -> NDArray[np.int64]:
    """The heads of a tensor with all projections, in the order of queries, keys, values: see `grouped_qkv` and
    `qkv_parts` of TensorNames.
    """
    stored = np.arange(heads + 2 * kv_heads)
    if num_parts:
        parts = stored.reshape(num_parts, 3, -1)
        return np.concatenate((parts[:, 0].ravel(), parts[:, 2].ravel(), parts[:, 1].ravel()))
    if is_grouped:
        groups = stored.reshape(kv_heads, -1)
        return np.concatenate((groups[:, :-2].ravel(), groups[:, -2], groups[:, -1]))
    return stored


def fused_rows(facts: RecurrentConfig) -> list[tuple[str, NDArray[np.int64]]]:
    """The names of two fused tensors, and the order of their rows that puts the same part of all heads together. The
    first tensor has, for each key head, its query, its key, and the values and gates of its heads; the second one the
    strengths and the decays of its heads.
    """
    served = facts.num_heads // facts.num_key_heads
    sizes = {"qkvz": (facts.key_dim, facts.key_dim, *2 * (served * facts.value_dim,)), "ba": (served, served)}
    ordered = []
    for name, parts in sizes.items():
        stored = np.arange(facts.num_key_heads * sum(parts)).reshape(facts.num_key_heads, -1)
        columns = np.split(stored, np.cumsum(parts)[:-1], 1)
        ordered.append((name, np.concatenate([column.ravel() for column in columns])))
    return ordered
