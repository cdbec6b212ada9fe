"""Arrays that start at a cache line, as vector loads want them; large ones in huge pages."""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CACHE_LINE_BYTES = 64
_HUGE_PAGE_BYTES = 2**21


def aligned(num_elements: int, dtype: Any) -> NDArray[Any]:
    """A flat array of zeros; the system hands its pages out as they are first written.

    Huge pages spare address translations: weights and KV are read in full by each step, faster than 4 KiB pages allow.
    """
    num_bytes = num_elements * np.dtype(dtype).itemsize
    is_large = num_bytes >= 2 * _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
    boundary = _HUGE_PAGE_BYTES if is_large else _CACHE_LINE_BYTES
    memory = _huge(num_bytes + boundary) if is_large else np.zeros(num_bytes + boundary, np.uint8)
    start = -memory.ctypes.data % boundary
    return memory[start : start + num_bytes].view(dtype)


def _huge(num_bytes: int) -> NDArray[np.uint8]:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
