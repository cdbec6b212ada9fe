"""Matrix tiles in registers: the innermost loops of matrix products, for vector units and for AMX, and their end.

B is packed in panels of 16 columns: fp32 as [depth][16], int8 as [depth / 4][16][4]. Both VNNI (`vpdpbusd`) and AMX
(`tdpbusd`) read this layout, so one packed weight serves batches of all sizes. Bounds are not checked.

The end of a product works on a tile of sums with two vectors of 16 columns: it applies scales and bias, then stores,
adds or gates. The mode is a compile-time constant. STORE writes the results, ADD adds them to what is there. GATE reads
the first vector as gates and the second as the values, and stores one vector, silu(gate) * up.

AMX's tile registers have 16 rows of 64 bytes. The AMX unit works beside the vector units. `multiply_and_finish`
therefore interleaves the products of one tile with the vector code that finishes the previous tile, which then costs
almost nothing. Registers: 0-3 sums, 4-5 rows of a, 6-7 panels of b. A thread calls `configure_amx` first. On a CPU
without AMX no code is written, because LLVM cannot select the instructions there.
"""

from typing import NamedTuple

from llvmlite import ir
from numba import types

from engine.kernels.cpu.arguments import Address, Matrix
from engine.kernels.cpu.compiler import (
    ALL_LANES,
    BYTE_POINTER,
    FLOAT,
    FLOATS,
    INT8,
    INT32,
    INT64,
    INTS,
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
    constant,
    emitted,
)
from engine.kernels.cpu.machine import (
    AMX_TILE_ROW_BYTES,
    AMX_TILE_ROWS,
    CACHE_LINE_BYTES,
    FLOAT_BYTES,
    LOG2_E,
    VECTOR_BYTES,
    knows_amx,
)

STORE, ADD, GATE = range(3)
FINISH_ROWS = 4
"""Rows that are finished side by side. Sums and factors of this many rows are read, even past the last row."""

_ROWS_IN_REGISTERS = 8  # with more rows in a tile, LLVM runs out of registers
_PANEL_BYTES = AMX_TILE_ROWS * AMX_TILE_ROW_BYTES


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
        vector = INTS if is_int8 else FLOATS
        totals = [constant(vector, 0)] * (num_rows * num_panels)
        with emit.loop(args[1], totals) as loop:
            b_row = builder.mul(loop.index, INT64(VECTOR_BYTES))
            a_column = builder.mul(loop.index, INT64(FLOAT_BYTES))
            columns = [
                emit.load(emit.at(b_at, builder.add(b_row, builder.mul(b_step, INT64(j)))), vector, VECTOR_BYTES)
                for j in range(num_panels)
            ]
            for row in range(num_rows):
                totals = loop.carried[row * num_panels : (row + 1) * num_panels]
                if num_rows > _ROWS_IN_REGISTERS:
                    first = row - row % 3  # x86 addresses reach rows 0, 1 and 2 from one pointer
                    at = emit.at(a_at, builder.add(a_column, builder.mul(a_step, INT64(first))))
                    loop.next += _multiply_row(emit, at, a_step, row - first, columns, totals, is_int8=is_int8)
                    continue
                at = emit.at(a_at, builder.add(a_column, builder.mul(a_step, INT64(row))))
                left = emit.splat(emit.load(at, INT32 if is_int8 else FLOAT))
                multiply = _multiply_bytes if is_int8 else Emitter.multiply_add
                loop.next += [multiply(emit, left, *pair) for pair in zip(columns, totals, strict=True)]
        for i, total in enumerate(loop.next):
            row_at = builder.mul(out_step, INT64(i // num_panels))
            emit.store(total, emit.at(out_at, builder.add(row_at, INT64(i % num_panels * VECTOR_BYTES))))
        return context.get_dummy_value()

    return types.void(matrices, types.intp, rows, panels, element), generate


def _multiply_bytes(emit: Emitter, left: Value, right: Value, total: Value) -> Value:
    """total + left * right, where left's bytes are unsigned and right's signed: 4 products in each lane."""
    return emit.call("llvm.x86.avx512.vpdpbusd.512", INTS, total, left, right)


def _multiply_row(
    emit: Emitter, a: Value, a_step: Value, row: int, columns: list[Value], totals: list[Value], *, is_int8: bool
) -> list[Value]:
    """totals + a[row] * columns, for `row` 0 to 2. `a` points at a number (int8: 4 bytes) of row 0.

    It is assembly because LLVM would read the numbers of many rows first, and spill them in the innermost loop.
    """
    vector, read, multiply = (INTS, "vpbroadcastd", "vpdpbusd") if is_int8 else (FLOATS, "vbroadcastss", "vfmadd231ps")
    count = len(columns)
    at = f"(${2 * count + 1}" + ("", f",${2 * count + 2}", f",${2 * count + 2},2")[row] + ")"
    code = [f"{read} {at}, ${count}"]
    code += [f"{multiply} ${count + 1 + i}, ${count}, ${i}" for i in range(count)]
    operands = ["=&v"] * (count + 1) + ["v"] * count + ["r", "r"] + [str(i) for i in range(count)]
    kinds = [vector] * count + [BYTE_POINTER, INT64] + [vector] * count
    results = emit.builder.asm(
        ir.FunctionType(ir.LiteralStructType([vector] * (count + 1)), kinds),
        "\n".join(code),
        ",".join([*operands, "~{memory}"]),
        [*columns, a, a_step, *totals],
        True,
    )
    return emit.members(results, count)


class SumRows(NamedTuple):
    """The rows of a tile: contiguous sums, factors of the rows, and where the results go."""

    sums: Address
    factors: Address
    out: Address
    out_step: int
    num_rows: int


class ColumnData(NamedTuple):
    """One number for each column. `offsets` is what the zero point of `a` added to int32 sums."""

    offsets: Address
    scales: Address
    biases: Address


class SumTile(NamedTuple):
    """A tile of sums that waits to be finished."""

    rows: SumRows
    columns: ColumnData
    num_panels: int  # panels left in the matrix; with 1, the second vector is padding


class Finish:
    """Writes the code that finishes rows of a SumTile."""

    def __init__(self, emit: Emitter, tile: Value, mode: int, *, is_int8: bool) -> None:
        self._emit, self._mode, self._is_int8 = emit, mode, is_int8
        rows, columns, num_panels = emit.members(tile, 3)
        sums, factors, out, self._out_step, self.num_rows = emit.members(rows, 5)
        self._sums, self._factors, self._out = (emit.pointer(address) for address in (sums, factors, out))
        self._has_both_panels = emit.builder.icmp_signed(">", num_panels, INT64(1))
        pointers = [emit.pointer(address) for address in emit.members(columns, 3)]
        vectors = (INTS if is_int8 else FLOATS, FLOATS, FLOATS)
        self._columns = [
            [emit.load(emit.at(p, panel * VECTOR_BYTES), vector) for p, vector in zip(pointers, vectors, strict=True)]
            for panel in range(2)
        ]

    def group(self, first: Value) -> None:
        """Write code that finishes up to FINISH_ROWS rows from `first` on, without a branch."""
        for row in (self._emit.builder.add(first, INT64(i)) for i in range(FINISH_ROWS)):
            self._row(row, self._emit.builder.icmp_signed("<", row, self.num_rows))

    def remaining(self, first: Value) -> None:
        """Write code that finishes all rows from `first` on."""
        builder = self._emit.builder
        count = builder.sub(self.num_rows, first)
        with builder.if_then(builder.icmp_signed(">", count, INT64(0)), likely=False):
            groups = builder.sdiv(builder.add(count, INT64(FINISH_ROWS - 1)), INT64(FINISH_ROWS))
            with self._emit.loop(groups, []) as loop:
                self.group(builder.add(first, builder.mul(loop.index, INT64(FINISH_ROWS))))

    def _row(self, row: Value, exists: Value) -> None:
        emit, builder = self._emit, self._emit.builder
        factor = emit.splat(emit.load(emit.at(self._factors, builder.mul(row, INT64(FLOAT_BYTES))), FLOAT))
        sums = emit.at(self._sums, builder.mul(row, INT64(2 * VECTOR_BYTES)))
        low, high = (self._scaled(emit.at(sums, i * VECTOR_BYTES), factor, i) for i in range(2))
        out = emit.at(self._out, builder.mul(row, self._out_step))
        if self._mode == GATE:
            emit.store_if(exists, self._gated(low, high), out)
            return
        self._store(low, out, exists)
        self._store(high, emit.at(out, VECTOR_BYTES), builder.and_(exists, self._has_both_panels))

    def _scaled(self, sums: Value, factor: Value, panel: int) -> Value:
        """(sum - offset) * scale * factor + bias."""
        emit, builder = self._emit, self._emit.builder
        offsets, scales, biases = self._columns[panel]
        total = emit.load(sums, INTS if self._is_int8 else FLOATS)
        if self._is_int8:
            total = builder.sitofp(builder.sub(total, offsets), FLOATS)
        return emit.multiply_add(total, builder.fmul(scales, factor), biases)

    def _store(self, value: Value, out: Value, condition: Value) -> None:
        if self._mode == ADD:
            value = self._emit.builder.fadd(self._emit.load_if(condition, out), value)
        self._emit.store_if(condition, value, out)

    def _gated(self, gate: Value, up: Value) -> Value:
        """silu(gate) * up. One Newton step makes the CPU's estimate of 1 / x as exact as a division."""
        emit, builder = self._emit, self._emit.builder
        exponent = builder.fmul(gate, constant(FLOATS, -LOG2_E))
        exponent = emit.call("llvm.minnum.v16f32", FLOATS, exponent, constant(FLOATS, 126.0))
        divisor = builder.fadd(emit.power_of_two(exponent), constant(FLOATS, 1.0))
        estimate = emit.call("llvm.x86.avx512.rcp14.ps.512", FLOATS, divisor, constant(FLOATS, 0.0), ALL_LANES)
        correction = emit.multiply_add(builder.fneg(divisor), estimate, constant(FLOATS, 2.0))
        return builder.fmul(builder.fmul(gate, up), builder.fmul(estimate, correction))


@emitted
def finish_rows(typing: TypingContext, tile: NumbaType, mode: NumbaType, element: NumbaType) -> Intrinsic:
    """Finish all rows of a SumTile. `mode` is a compile-time constant, `element` any element of the sums."""
    is_int8 = element != types.float32

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        finish = Finish(Emitter(context, builder), args[0], mode.literal_value, is_int8=is_int8)
        finish.remaining(INT64(0))
        return context.get_dummy_value()

    return types.void(tile, mode, element), generate


class AmxProduct(NamedTuple):
    """out = a @ b of bytes. `depth` counts 64 bytes of a row; the step of `b` is from panel to panel."""

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
    """out[32, 32] = a @ b of bf16 numbers in a TileProduct, with fp32 sums.

    `depth` counts 64 bytes of a row. Panels of b are [depth / 2][16][2].
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        if not knows_amx():
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
) -> Intrinsic:
    """out[16 * halves, 32] = a @ b of an AmxProduct, while the previous SumTile is finished and weights are prefetched.

    `halves` is 1 or 2; `halves` and `mode` are compile-time constants. prefetch: Prefetch.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        if not knows_amx():
            return context.get_dummy_value()
        tile, depth = _Tile(emit, args[0], "tdpbusd", halves.literal_value), builder.extract_value(args[0], 3)
        finish = Finish(emit, args[2], mode.literal_value, is_int8=True)
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

    return types.void(matrices, halves, previous, mode, prefetch), generate


def _prefetch(emit: Emitter, at: Value, first: Value, count: Value) -> None:
    """Write code that prefetches `count` cache lines from line `first` on."""
    builder = emit.builder
    with builder.if_then(builder.icmp_signed(">", count, INT64(0))), emit.loop(count, []) as loop:
        line = builder.mul(builder.add(first, loop.index), INT64(CACHE_LINE_BYTES))
        emit.call("llvm.prefetch.p0", VOID, emit.at(at, line), INT32(0), INT32(2), INT32(1))


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
