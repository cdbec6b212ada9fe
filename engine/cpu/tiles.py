"""Matrix tiles in registers: the innermost loops of every matrix product on CPU.

A place is a tuple of an array, an offset and a step from row to row (of a packed B: from panel to panel), in elements.
B is packed in panels of 16 columns: fp32 as [depth][16], int8 as [depth / 4][16][4], which is what both VNNI
(`vpdpbusd`) and AMX (`tdpbusd`) read, so one packed weight serves batches of all sizes. Nothing is checked: a wrong
offset reads or writes foreign memory.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.cpu.features import knows_amx
from engine.cpu.ir import FLOAT, FLOATS, INT8, INT32, INT64, INTS, VOID, Emitter, constant

PANEL = 16
_VECTOR_BYTES = 64
_AMX_ROWS = 16
_AMX_PANEL_BYTES = 1024
_emit: Callable[[Callable[..., Any]], Any] = intrinsic(prefer_literal=True)


@_emit
def multiply_tile(typing: Any, a: Any, b: Any, c: Any, depth: Any, rows: Any, panels: Any) -> Any:
    """c[rows, panels * 16] = a[rows, depth] @ b, kept in registers until it is whole.

    `rows` and `panels` are compile-time constants. int8: `a` unsigned bytes, `depth` in groups of 4, sums int32.
    """
    signature = types.void(a, b, c, types.intp, rows, panels)
    num_rows, num_panels = rows.literal_value, panels.literal_value
    is_int8 = a[0].dtype == types.uint8

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        (a_at, a_step), (b_at, b_step), (c_at, c_step) = (emit.place(kind, args[i]) for i, kind in enumerate((a, b, c)))
        scalar, vector = (INT32, INTS) if is_int8 else (FLOAT, FLOATS)
        totals = [constant(vector, 0)] * (num_rows * num_panels)
        with emit.loop(args[3], totals) as loop:
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

    return signature, generate


@_emit
def multiply_amx_tile(typing: Any, a: Any, b: Any, c: Any, depth: Any, halves: Any) -> Any:
    """c[16 * halves, 32] = a @ b with AMX's tile registers; `halves` is 1 or 2, `depth` counts 64 bytes of a row.

    int8, or bf16 as arrays of uint16, where panels of b are [depth / 2][16][2] and sums fp32. The thread has called
    `configure_amx`. Registers: 0-3 sums, 4-5 rows of a, 6-7 panels of b. Does nothing on a CPU without AMX, whose
    compiler would not know it.
    """
    signature = types.void(a, b, c, types.intp, halves)
    num_halves = halves.literal_value
    dot = "llvm.x86.tdpbusd" if a[0].dtype == types.uint8 else "llvm.x86.tdpbf16ps"

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        if not knows_amx():
            return context.get_dummy_value()
        (a_at, a_step), (b_at, b_step), (c_at, c_step) = (emit.place(kind, args[i]) for i, kind in enumerate((a, b, c)))

        def load(register: int, at: Any, step: Any) -> None:
            emit.call("llvm.x86.tileloadd64", VOID, INT8(register), at, step)

        for register in range(2 * num_halves):
            emit.call("llvm.x86.tilezero", VOID, INT8(register))
        with emit.loop(args[3], []) as loop:
            a_column = builder.mul(loop.index, INT64(_VECTOR_BYTES))
            b_row = builder.mul(loop.index, INT64(_AMX_PANEL_BYTES))
            for j in range(2):
                load(6 + j, emit.at(b_at, builder.add(b_row, builder.mul(b_step, INT64(j)))), INT64(_VECTOR_BYTES))
            for half in range(num_halves):
                row_at = builder.mul(a_step, INT64(_AMX_ROWS * half))
                load(4 + half, emit.at(a_at, builder.add(a_column, row_at)), a_step)
                for j in range(2):
                    emit.call(dot, VOID, INT8(2 * half + j), INT8(4 + half), INT8(6 + j))
        for register in range(2 * num_halves):
            row_at = builder.mul(c_step, INT64(_AMX_ROWS * (register // 2)))
            at = emit.at(c_at, builder.add(row_at, INT64(register % 2 * _VECTOR_BYTES)))
            emit.call("llvm.x86.tilestored64", VOID, INT8(register), at, c_step)
        return context.get_dummy_value()

    return signature, generate


@_emit
def configure_amx(typing: Any, shapes: Any) -> Any:
    """Set this thread's tile registers up; `shapes`: 64 bytes, see `features.amx_shapes`."""
    signature = types.void(shapes)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        if knows_amx():
            emit.call("llvm.x86.ldtilecfg", VOID, emit.array(signature.args[0], args[0]))
        return context.get_dummy_value()

    return signature, generate


@_emit
def release_amx(typing: Any) -> Any:
    """Give the tile registers back, so that switching threads does not save them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if knows_amx():
            Emitter(context, builder).call("llvm.x86.tilerelease", VOID)
        return context.get_dummy_value()

    return types.void(), generate
