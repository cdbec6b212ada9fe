"""Many rows of bytes copied from here to there in one go, without the GIL: how blocks go in and out of a KV cache."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from engine.attention.decode_kernel import jit

Bytes = NDArray[np.uint8]
Rows = NDArray[np.int64]
_emit_memcpy: Any = cgutils.raw_memcpy
_operation: Callable[[Callable[..., Any]], Any] = intrinsic


@_operation
def _memcpy(typing: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """Between addresses; numba's own loop over bytes is three times slower. Nothing is checked."""
    signature = types.void(types.intp, types.intp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, of = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in args[:2])
        _emit_memcpy(builder, to, of, args[2], 1)
        return context.get_dummy_value()

    return signature, generate


@jit
def _copy(target: Any, target_rows: Any, source: Any, source_rows: Any, row_bytes: Any) -> None:
    for i in range(len(target_rows)):
        _memcpy(target + target_rows[i] * row_bytes, source + source_rows[i] * row_bytes, row_bytes)


def copy_rows(target: Bytes, target_rows: Rows, source: Bytes, source_rows: Rows) -> None:
    """Row `source_rows[i]` of `source` becomes row `target_rows[i]` of `target`, for every i.

    Both are C order [rows, bytes of a row], with rows of one length. IndexError for a row that does not exist,
    ValueError if the shapes do not fit or `target` cannot be written.
    """
    row_bytes = target.shape[1]
    if source.shape[1] != row_bytes or len(target_rows) != len(source_rows):
        raise ValueError(f"rows {source.shape} and {target.shape}, {len(source_rows)} to {len(target_rows)}")
    if not target.flags.writeable:
        raise ValueError("the target is read-only")
    if not (target.flags.c_contiguous and source.flags.c_contiguous):
        raise ValueError("rows must lie one after another")
    for rows, array in ((target_rows, target), (source_rows, source)):
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(array):
            raise IndexError(f"rows {rows.min()}..{rows.max()} of {len(array)}")
    _copy(target.ctypes.data, target_rows, source.ctypes.data, source_rows, row_bytes)
