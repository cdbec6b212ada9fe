"""Matrix tiles in vector registers: the innermost loops of matrix products on CPU. `amx.py` has those for AMX.

A place is an address and a step from row to row (of a packed B: from panel to panel) in bytes; see `vectors.py`.
B is packed in panels of 16 columns: fp32 as [depth][16], int8 as [depth / 4][16][4], which is what both VNNI
(`vpdpbusd`) and AMX (`tdpbusd`) read, so one packed weight serves batches of all sizes. Nothing is checked: a wrong
offset reads or writes foreign memory.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.cpu.ir import FLOAT, FLOATS, INT32, INT64, INTS, Emitter, constant

PANEL = 16
_VECTOR_BYTES = 64
_emit: Callable[[Callable[..., Any]], Any] = intrinsic(prefer_literal=True)


@_emit
def multiply_tile(typing: Any, places: Any, depth: Any, rows: Any, panels: Any, kind: Any) -> Any:
    """c[rows, panels * 16] = a[rows, depth] @ b, kept in registers until it is whole; places: (a, b, c).

    `rows` and `panels` are compile-time constants, `kind` is any number of the sums' dtype. int32: `a` unsigned bytes,
    `depth` in groups of 4.
    """
    num_rows, num_panels = rows.literal_value, panels.literal_value
    is_int8 = kind != types.float32

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        (a_at, a_step), (b_at, b_step), (c_at, c_step) = (emit.place(args[0], i) for i in range(3))
        scalar, vector = (INT32, INTS) if is_int8 else (FLOAT, FLOATS)
        totals = [constant(vector, 0)] * (num_rows * num_panels)
        with emit.loop(args[1], totals) as loop:
            b_row = builder.mul(loop.index, INT64(_VECTOR_BYTES))
            a_column = builder.mul(loop.index, INT64(4))
            columns = [
                emit.load(emit.at(b_at, builder.add(b_row, builder.mul(b_step, INT64(j)))), vector, _VECTOR_BYTES)
                for j in range(num_panels)
            ]
            for row in range(num_rows):
                at = emit.at(a_at, builder.add(a_column, builder.mul(a_step, INT64(row))))
                left = emit.splat(emit.load(at, scalar))
                for j, right in enumerate(columns):
                    total = loop.carried[row * num_panels + j]
                    if is_int8:  # the left operand's bytes are unsigned: 4 products for each lane
                        loop.next.append(emit.call("llvm.x86.avx512.vpdpbusd.512", INTS, total, left, right))
                    else:
                        loop.next.append(emit.multiply_add(left, right, total))
        for i, total in enumerate(loop.next):
            row_at = builder.mul(c_step, INT64(i // num_panels))
            emit.store(total, emit.at(c_at, builder.add(row_at, INT64(i % num_panels * _VECTOR_BYTES))))
        return context.get_dummy_value()

    return types.void(places, types.intp, rows, panels, kind), generate
