"""Arrays that start at a cache line, as vector loads want them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_CACHE_LINE_BYTES = 64


def aligned(num_elements: int, dtype: Any) -> NDArray[Any]:
    """A flat array of zeros; the system hands its pages out as they are first written."""
    num_bytes = num_elements * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + _CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE_BYTES
    return memory[start : start + num_bytes].view(dtype)
