"""Types of kernel arguments: arrays, addresses, and the ranges that threads share. numba ignores the annotations.

The innermost loops take addresses instead of arrays, because an array is a counted reference and counting costs as much
as a small tile.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Address: TypeAlias = int
"""Byte address of an array's element, from `vectors.address`. Nothing checks the bounds."""
Element: TypeAlias = np.generic
"""Any element of an array. Kernels look at its dtype only, at compile time."""
Array: TypeAlias = NDArray[np.generic]
Floats: TypeAlias = NDArray[np.float32]
Halves: TypeAlias = NDArray[np.uint16]
"""bf16 or fp16 numbers as their 16 bits: numba has neither type on CPU."""
Bytes: TypeAlias = NDArray[np.uint8]
Int32s: TypeAlias = NDArray[np.int32]
Int64s: TypeAlias = NDArray[np.int64]


class Share(NamedTuple):
    """The part of the work that one thread does: number `number` of `num_shares` equal shares."""

    number: int
    num_shares: int


class Span(NamedTuple):
    """A range of rows, tokens, heads or units: [first, end)."""

    first: int
    end: int


class Matrix(NamedTuple):
    """A matrix in memory: the address of its first row (packed weights: panel) and the bytes from one to the next."""

    address: Address
    step: int
