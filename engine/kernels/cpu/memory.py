"""Arrays that start at a cache line, as aligned vector loads need. Large arrays are in huge pages."""

import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engine.kernels.cpu.constants import CACHE_LINE_BYTES

_HUGE_PAGE_BYTES = 2**21


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
