"""Matrix tiles in vector registers: the innermost loops of matrix products. `amx.py` has the tiles for AMX.

B is packed in panels of 16 columns: fp32 as [depth][16], int8 as [depth / 4][16][4]. Both VNNI (`vpdpbusd`) and AMX
(`tdpbusd`) read this layout, so one packed weight serves batches of all sizes. Bounds are not checked.
"""

from typing import NamedTuple

from numba import types

from engine.kernels.cpu.arguments import Matrix
from engine.kernels.cpu.constants import FLOAT_BYTES, VECTOR_BYTES
from engine.kernels.cpu.ir import (
    FLOAT,
    FLOATS,
    INT32,
    INT64,
    INTS,
    Builder,
    CodeContext,
    Emitter,
    Intrinsic,
    NumbaType,
    Signature,
    TypingContext,
    Value,
    Values,
    constant,
    emitted,
)


class TileProduct(NamedTuple):
    """out = a @ b. The step of `b` is from panel to panel."""

    a: Matrix
    b: Matrix
    out: Matrix


@emitted
def multiply_tile(
    typing: TypingContext,
    matrices: NumbaType,
    depth: NumbaType,
    rows: NumbaType,
    panels: NumbaType,
    element: NumbaType,
) -> Intrinsic:
    """out[rows, panels * 16] = a[rows, depth] @ b of a TileProduct. Sums stay in registers until they are complete.

    `rows` and `panels` are compile-time constants. `element` is any element of the sums: float32, or int32, for which
    `a` holds unsigned bytes and `depth` counts groups of 4.
    """
    num_rows, num_panels = rows.literal_value, panels.literal_value
    is_int8 = element != types.float32

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        (a_at, a_step), (b_at, b_step), (out_at, out_step) = (emit.matrix(m) for m in emit.members(args[0], 3))
        scalar, vector = (INT32, INTS) if is_int8 else (FLOAT, FLOATS)
        totals = [constant(vector, 0)] * (num_rows * num_panels)
        with emit.loop(args[1], totals) as loop:
            b_row = builder.mul(loop.index, INT64(VECTOR_BYTES))
            a_column = builder.mul(loop.index, INT64(FLOAT_BYTES))
            columns = [
                emit.load(emit.at(b_at, builder.add(b_row, builder.mul(b_step, INT64(j)))), vector, VECTOR_BYTES)
                for j in range(num_panels)
            ]
            for row in range(num_rows):
                at = emit.at(a_at, builder.add(a_column, builder.mul(a_step, INT64(row))))
                left = emit.splat(emit.load(at, scalar))
                for j, right in enumerate(columns):
                    total = loop.carried[row * num_panels + j]
                    if is_int8:  # the left operand's bytes are unsigned: 4 products in each lane
                        loop.next.append(emit.call("llvm.x86.avx512.vpdpbusd.512", INTS, total, left, right))
                    else:
                        loop.next.append(emit.multiply_add(left, right, total))
        for i, total in enumerate(loop.next):
            row_at = builder.mul(out_step, INT64(i // num_panels))
            emit.store(total, emit.at(out_at, builder.add(row_at, INT64(i % num_panels * VECTOR_BYTES))))
        return context.get_dummy_value()

    return types.void(matrices, types.intp, rows, panels, element), generate
