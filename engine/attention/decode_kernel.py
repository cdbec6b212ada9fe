"""Paged decode attention on CPU: one query per sequence against its blocks, read in memory order, copied nowhere.

Two passes over a sequence's context (scores, then values) with a softmax between them (PagedAttention, Kwon et al.
2023, §4.3, on a CPU). A token's heads lie side by side, so each pass reads a block front to back; while it does, the
rows of the next block are prefetched, because blocks follow each other anywhere in memory.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from engine.attention.vector_ops import add_scaled_rows, dot_rows, prefetch_row

DecodeKernel = Callable[["DecodeArrays", "Part", NDArray[np.float32]], None]
LOG2_E = np.float32(1.4426950408889634)
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": True, "error_model": "numpy"}


def jit(function: Callable[..., Any]) -> Any:
    """Compile for threads without the GIL, and keep the machine code on disk where that is possible."""
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # no directory for the cache can be written
        return numba.njit(**_OPTIONS)(function)


class DecodeArrays(NamedTuple):
    """What the kernel reads and writes. All fp32 arrays are flat and C order; shapes in brackets are their meaning."""

    queries: Any  # [num_seqs, num_kv_heads, group_size, head_dim]
    out: Any  # the same
    keys: Any  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: Any  # the same
    tables: Any  # [num_seqs, max_blocks] int32
    context_lens: Any  # [num_seqs] int32
    block_size: int
    token_step: int  # num_kv_heads * head_dim
    window: int  # in tokens, at least 1
    scale: Any  # fp32, log2(e) included


class Part(NamedTuple):
    """The share of one thread: sequences and key/value heads from first to before end."""

    first_seq: int
    end_seq: int
    first_head: int
    end_head: int


@jit
def _weigh(scores: Any, scale: Any) -> None:
    """Softmax of scores [num_keys] in place; `scale` has log2(e) in it.

    2^x is split into a power of two, added to the exponent bits, and a polynomial for x in [-0.5, 0.5]. Loops count
    from 0: only then does the compiler see that no index is negative, and use vectors.
    """
    bits = scores.view(np.int32)
    highest = scores[0]
    for j in range(len(scores)):
        highest = max(highest, scores[j])
    for j in range(len(scores)):
        x = max((scores[j] - highest) * scale, np.float32(-126.0))
        whole = np.floor(x + np.float32(0.5))
        x -= whole
        power = np.float32(1.5353362e-4)
        power = power * x + np.float32(1.3398874e-3)
        power = power * x + np.float32(9.6184370e-3)
        power = power * x + np.float32(5.5503324e-2)
        power = power * x + np.float32(2.4022648e-1)
        power = power * x + np.float32(6.9314720e-1)
        scores[j] = power * x + np.float32(1.0)
        bits[j] += np.int32(whole) << np.int32(23)
    total = np.float32(0.0)
    for j in range(len(scores)):
        total += scores[j]
    for j in range(len(scores)):
        scores[j] /= total


@jit
def _locate(arrays: Any, seq: int, token: int, end: int) -> Any:
    """Of the block that holds `token`: rows from there on, offset of the first, offset of the next block."""
    block_size = arrays.block_size
    block, row = token // block_size, token % block_size
    following = min(block + 1, (end - 1) // block_size)
    first = (arrays.tables[seq, block] * block_size + row) * arrays.token_step
    return min(block_size - row, end - token), first, arrays.tables[seq, following] * block_size * arrays.token_step


@lru_cache(maxsize=64)
def decode_kernel(group_size: int, head_dim: int) -> DecodeKernel:
    """The kernel `(arrays, part, scores)` for a shape of heads.

    `scores` is flat fp32 scratch of at least num_kv_heads * group_size * longest context. The loops are not cut into
    functions, because only constants of this closure are part of the key under which compiled code is kept on disk.
    """

    def kernel(arrays: Any, part: Any, scores: Any) -> None:
        group_dim = group_size * head_dim
        for seq in range(part.first_seq, part.end_seq):
            end = arrays.context_lens[seq]
            start = max(0, end - arrays.window)
            step = end - start
            seq_at = seq * arrays.token_step * group_size
            token = start
            while token < end:
                num_rows, at, ahead = _locate(arrays, seq, token, end)
                for row in range(num_rows):
                    for head in range(part.first_head, part.end_head):
                        query, key = (arrays.queries, seq_at + head * group_dim), (arrays.keys, at + head * head_dim)
                        score = (scores, head * group_size * step + token - start + row, step)
                        dot_rows(query, key, score, group_size, head_dim)
                        prefetch_row(arrays.keys, ahead + head * head_dim, head_dim)
                    at += arrays.token_step
                    ahead += arrays.token_step
                token += num_rows
            for head in range(part.first_head * group_size, part.end_head * group_size):
                row_at = head * step
                _weigh(scores[row_at : row_at + step], arrays.scale)
                arrays.out[seq_at + head * head_dim : seq_at + (head + 1) * head_dim] = np.float32(0.0)
            token = start
            while token < end:
                num_rows, at, ahead = _locate(arrays, seq, token, end)
                for row in range(num_rows):
                    for head in range(part.first_head, part.end_head):
                        value, target = (arrays.values, at + head * head_dim), (arrays.out, seq_at + head * group_dim)
                        score = (scores, head * group_size * step + token - start + row, step)
                        add_scaled_rows(score, value, target, group_size, head_dim)
                        prefetch_row(arrays.values, ahead + head * head_dim, head_dim)
                    at += arrays.token_step
                    ahead += arrays.token_step
                token += num_rows

    compiled: DecodeKernel = jit(kernel)
    return compiled
