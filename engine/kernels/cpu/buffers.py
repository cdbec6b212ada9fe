"""Memory of the kernels: aligned arrays, and scratch that is kept between steps.

Arrays start at a cache line, as aligned vector loads need. Large arrays are in huge pages.
"""

import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engine.kernels.cpu.arguments import AttentionScratch, Halves, HeadShape, Splits
from engine.kernels.cpu.machine import (
    AMX_QUERY_ROWS,
    CACHE_LINE_BYTES,
    FLOAT_BYTES,
    KEY_TILE,
    LANES,
    LIMBS_TAIL_BYTES,
    SPLIT,
    keys_at_once,
)

_HUGE_PAGE_BYTES = 2**21


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def aligned(num_elements: int, dtype: DTypeLike) -> NDArray[Any]:
    """A flat array of zeros. The system commits its pages at the first write.

    Huge pages spare address translations: every step reads all weights and KV, faster than 4 KiB pages allow.
    """
    num_bytes = num_elements * np.dtype(dtype).itemsize
    is_large = num_bytes >= 2 * _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
    boundary = _HUGE_PAGE_BYTES if is_large else CACHE_LINE_BYTES
    memory = _huge(num_bytes + boundary) if is_large else np.zeros(num_bytes + boundary, np.uint8)
    start = -memory.ctypes.data % boundary
    return memory[start : start + num_bytes].view(dtype)


def _huge(num_bytes: int) -> NDArray[np.uint8]:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


_NO_HALVES: Halves = np.empty(0, np.uint16)


class Buffers:
    """Named arrays that grow when a larger size is requested. For one thread at a time."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}
        self.version = 0
        """Changes whenever an array moves."""

    def get(self, name: str, size: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """An array of at least `size` elements. Its contents are those of the last use."""
        array = self._arrays.get(name)
        if array is None or array.size < size:
            array = self._arrays[name] = aligned(size + size // 2, dtype)
            self.version += 1
        return array

    def attention(self, shape: HeadShape, num_tokens: int, *, has_prompt: bool, bf16: bool = False) -> AttentionScratch:
        """Scratch of one thread for the attention of a step. With `bf16`, prompts are computed in bf16."""
        keys = keys_at_once(shape.head_dim)
        packed = keys * shape.head_dim if has_prompt else 0
        floats, halves = (0, packed) if bf16 else (packed, 0)
        num_queries = num_tokens * shape.num_heads // shape.num_kv_heads
        lanes = round_up(shape.num_heads, LANES)
        query_bytes = shape.num_heads * (2 * shape.head_dim + LIMBS_TAIL_BYTES)
        if shape.num_planes == 1:  # queries and sums of rows, see shared_rows.py
            query_bytes = 2 * lanes * shape.head_dim * FLOAT_BYTES
        return AttentionScratch(
            scores=self.get("scores", max(AMX_QUERY_ROWS * (keys + KEY_TILE), shape.num_heads * SPLIT)),
            keys=self.get("keys", floats),
            values=self.get("values", floats),
            keys16=self.get("keys16", halves, np.uint16) if halves else _NO_HALVES,
            values16=self.get("values16", halves, np.uint16),
            rows16=self.get(
                "rows16", AMX_QUERY_ROWS * max(keys + KEY_TILE, shape.head_dim) if halves else 0, np.uint16
            ),
            tile=self.get("tile", max(AMX_QUERY_ROWS * KEY_TILE, KEY_TILE * shape.head_dim)),
            factors=self.get("query_factors", max(AMX_QUERY_ROWS, lanes)),
            peaks=self.get("peaks", max(num_queries if has_prompt else 0, lanes)),
            totals=self.get("totals", max(num_queries if has_prompt else 0, lanes)),
            prepared=self.get("prepared", query_bytes, np.uint8),
        )

    def splits(self, shape: HeadShape, num_split: int) -> Splits:
        """Memory for the results of decode attention in a step, which all threads share: `num_split` of each head, see
        StepFacts.
        """
        count = num_split * shape.num_heads
        return Splits(
            rows=self.get("split_rows", count * shape.head_dim),
            peaks=self.get("split_peaks", count),
            totals=self.get("split_totals", count),
        )
