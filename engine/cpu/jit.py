"""How loops are compiled here: for threads without the GIL, machine code kept on disk.

Compiled code on disk is keyed by the file of the outermost function and not by what it calls: `code_version` below goes
into that key.
"""

from collections.abc import Callable
from typing import Any

import numba

OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": True, "error_model": "numpy"}


def jit(function: Callable[..., Any]) -> Any:
    """Compile at the first call with each combination of types."""
    try:
        return numba.njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # no directory for the cache can be written
        return numba.njit(**OPTIONS)(function)
