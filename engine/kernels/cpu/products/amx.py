"""Matrix tiles in AMX registers: products of bytes and of bf16.

AMX's tile registers have 16 rows of 64 bytes. The AMX unit works beside the vector units. `multiply_and_finish`
therefore interleaves the products of one tile with the vector code that finishes the previous tile, which then costs
almost nothing. Registers: 0-3 sums, 4-5 rows of a, 6-7 panels of b. A thread calls `configure_amx` first. On a CPU
without AMX no code is written, because LLVM cannot select the instructions there.
"""

from typing import NamedTuple

from numba import types

from engine.kernels.cpu.arguments import Address, Element, Matrix
from engine.kernels.cpu.compilation.emitter import (
    INT8,
    INT64,
    VOID,
    Builder,
    CodeContext,
    Emitter,
    Intrinsic,
    NumbaType,
    Signature,
    TypingContext,
    Value,
    Values,
    emitted,
)
from engine.kernels.cpu.compilation.parts import select_by_dtype
from engine.kernels.cpu.machine import (
    AMX_DEPTH,
    AMX_QUERY_ROWS,
    AMX_TILE_ROW_BYTES,
    AMX_TILE_ROWS,
    CACHE_LINE_BYTES,
    PAIR,
    QUERY_TILE_ROWS,
    VECTOR_BYTES,
    knows_amx,
    knows_bf16,
)
from engine.kernels.cpu.products.finish import FINISH_ROWS, Finish
from engine.kernels.cpu.products.tiles import write_tile

BF16_QUERY_ROWS = AMX_QUERY_ROWS if knows_amx() else QUERY_TILE_ROWS
"""Queries of a prompt that are multiplied at once in bf16."""
_PANEL_BYTES = AMX_TILE_ROWS * AMX_TILE_ROW_BYTES
_MIN_ROWS = 5
"""In int8: vectors multiply fewer rows faster."""


def fits_amx(num_rows: int, a_step: int, element: Element) -> bool:
    """True if AMX multiplies a matrix with so many rows of so many bytes. `element`: any element of the weights."""
    raise NotImplementedError


def _are_many(num_rows: int, a_step: int, element: Element) -> bool:
    return num_rows >= _MIN_ROWS


def _are_whole(num_rows: int, a_step: int, element: Element) -> bool:
    """Any number of rows: AMX adds in another order than vectors."""
    return a_step % AMX_TILE_ROW_BYTES == 0


select_by_dtype(fits_amx, {types.int16: _are_whole}, _are_many)


class AmxProduct(NamedTuple):
    """out = a @ b of bytes or bf16. `depth` counts 64 bytes of a row; the step of `b` is from panel to panel."""

    a: Matrix
    b: Matrix
    out: Matrix
    depth: int


class Prefetch(NamedTuple):
    """Weights to prefetch: their address, and cache lines for every 64 bytes of a row that are multiplied."""

    address: Address
    lines: int


class _Tile:
    """Writes the code of one tile: 16 * `halves` rows of a, two panels of b."""

    def __init__(self, emit: Emitter, matrices: Value, dot: str, halves: int) -> None:
        self._emit, self._dot, self._halves = emit, f"llvm.x86.{dot}", halves
        self._a, self._b, self._out = (emit.matrix(matrix) for matrix in emit.members(matrices, 3))

    def clear(self) -> None:
        """Set the sums to 0."""
        for register in range(2 * self._halves):
            self._emit.call("llvm.x86.tilezero", VOID, INT8(register))

    def multiply(self, index: Value) -> None:
        """Add the products of the 64 bytes number `index` of each row."""
        emit, builder = self._emit, self._emit.builder
        b_row, a_column = builder.mul(index, INT64(_PANEL_BYTES)), builder.mul(index, INT64(AMX_TILE_ROW_BYTES))
        for j in range(2):
            at = emit.at(self._b[0], builder.add(b_row, builder.mul(self._b[1], INT64(j))))
            self._load(6 + j, at, INT64(AMX_TILE_ROW_BYTES))
        for half in range(self._halves):
            row_at = builder.mul(self._a[1], INT64(AMX_TILE_ROWS * half))
            self._load(4 + half, emit.at(self._a[0], builder.add(a_column, row_at)), self._a[1])
            for j in range(2):
                emit.call(self._dot, VOID, INT8(2 * half + j), INT8(4 + half), INT8(6 + j))

    def store(self) -> None:
        """Store the sums at `out`."""
        emit, builder = self._emit, self._emit.builder
        out_at, step = self._out
        for register in range(2 * self._halves):
            row_at = builder.mul(step, INT64(AMX_TILE_ROWS * (register // 2)))
            at = emit.at(out_at, builder.add(row_at, INT64(register % 2 * VECTOR_BYTES)))
            emit.call("llvm.x86.tilestored64", VOID, INT8(register), at, step)

    def _load(self, register: int, at: Value, step: Value) -> None:
        self._emit.call("llvm.x86.tileloadd64", VOID, INT8(register), at, step)


@emitted
def multiply_bf16_tile(typing: TypingContext, matrices: NumbaType, depth: NumbaType) -> Intrinsic:
    """out[BF16_QUERY_ROWS, 32] = a @ b of bf16 numbers in a TileProduct, with fp32 sums.

    `depth` counts 64 bytes of a row. Panels of b are [depth / 2][16][2]. A CPU without AMX multiplies vectors.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        if not knows_amx():
            if knows_bf16():
                num_pairs = builder.mul(args[1], INT64(AMX_DEPTH // PAIR))
                write_tile(emit, args[0], num_pairs, (BF16_QUERY_ROWS, 2), types.int16)
            return context.get_dummy_value()
        tile = _Tile(emit, args[0], "tdpbf16ps", 2)
        tile.clear()
        with emit.loop(args[1], []) as loop:
            tile.multiply(loop.index)
        tile.store()
        return context.get_dummy_value()

    return types.void(matrices, types.intp), generate


@emitted
def multiply_and_finish(
    typing: TypingContext,
    matrices: NumbaType,
    halves: NumbaType,
    previous: NumbaType,
    mode: NumbaType,
    prefetch: NumbaType,
    element: NumbaType,
) -> Intrinsic:
    """out[16 * halves, 32] = a @ b of an AmxProduct, while the previous SumTile is finished and weights are prefetched.

    `halves` is 1 or 2; `halves` and `mode` are compile-time constants. prefetch: Prefetch. `element`: any element of b.
    """
    is_int8 = element in (types.int8, types.int64)

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        if not knows_amx():
            return context.get_dummy_value()
        tile = _Tile(emit, args[0], "tdpbusd" if is_int8 else "tdpbf16ps", halves.literal_value)
        depth = builder.extract_value(args[0], 3)
        finish = Finish(emit, args[2], mode.literal_value, is_int8=is_int8)
        groups = builder.sdiv(builder.add(finish.num_rows, INT64(FINISH_ROWS - 1)), INT64(FINISH_ROWS))
        interleaved = emit.smaller(groups, depth)
        address, lines = emit.members(args[4], 2)
        ahead_at = emit.pointer(address)
        tile.clear()
        with builder.if_then(builder.icmp_signed(">", interleaved, INT64(0))), emit.loop(interleaved, []) as loop:
            tile.multiply(loop.index)
            finish.group(builder.mul(loop.index, INT64(FINISH_ROWS)))
            _prefetch(emit, ahead_at, builder.mul(loop.index, lines), lines)
        count = builder.sub(depth, interleaved)
        with builder.if_then(builder.icmp_signed(">", count, INT64(0))), emit.loop(count, []) as loop:
            index = builder.add(interleaved, loop.index)
            tile.multiply(index)
            _prefetch(emit, ahead_at, builder.mul(index, lines), lines)
        finish.remaining(builder.mul(interleaved, INT64(FINISH_ROWS)))
        tile.store()
        return context.get_dummy_value()

    return types.void(matrices, halves, previous, mode, prefetch, element), generate


def _prefetch(emit: Emitter, at: Value, first: Value, count: Value) -> None:
    """Write code that prefetches `count` cache lines from line `first` on."""
    builder = emit.builder
    with builder.if_then(builder.icmp_signed(">", count, INT64(0))), emit.loop(count, []) as loop:
        line = builder.mul(builder.add(first, loop.index), INT64(CACHE_LINE_BYTES))
        emit.prefetch(emit.at(at, line), to_l2=True)


@emitted
def configure_amx(typing: TypingContext, shapes: NumbaType) -> Intrinsic:
    """Configure this thread's tile registers. shapes: the 64 bytes of `machine.amx_shapes`."""
    signature = types.void(shapes)

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        if knows_amx():
            emit.call("llvm.x86.ldtilecfg", VOID, emit.array(signature.args[0], args[0]))
        return context.get_dummy_value()

    return signature, generate


@emitted
def release_amx(typing: TypingContext) -> Intrinsic:
    """Release the tile registers, so that a thread switch does not save them."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        if knows_amx():
            Emitter(context, builder).call("llvm.x86.tilerelease", VOID)
        return context.get_dummy_value()

    return types.void(), generate
