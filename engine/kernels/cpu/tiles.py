"""Matrix tiles in registers: the innermost loops of matrix products on vector units, and their end.

B is packed in panels of 16 columns: fp32, fp16 and fp8 as [depth][16], bf16 as [depth / 2][16][2], int8 as
[depth / 4][16][4]. All CPUs, and AMX (`amx.py`), read this layout, so one packed weight serves batches of all sizes.
fp16 becomes fp32 in registers, which is exact: results are those of the same numbers in fp32. So does bf16, unless the
CPU multiplies bf16 itself; then A is rounded to bf16, too. fp8 becomes fp32 divided by FP8_FACTOR, which is part of the
columns' scales. Bounds are not checked.

The end of a product works on a tile of sums with two vectors of 16 columns: it applies scales and bias, then stores,
adds or gates. The mode is a compile-time constant. STORE writes the results, ADD adds them to what is there. GATE reads
the first vector as gates and the second as the values, and stores one vector, silu(gate) * up.
"""

from typing import NamedTuple

from llvmlite import ir
from numba import types

from engine.kernels.cpu.arguments import Address, Matrix
from engine.kernels.cpu.compiler import (
    BYTE_POINTER,
    FLOAT,
    FLOATS,
    INT64,
    INTS,
    Builder,
    CodeContext,
    Emitter,
    Intrinsic,
    LLVMType,
    NumbaType,
    Signature,
    TypingContext,
    Value,
    Values,
    constant,
    emitted,
)
from engine.kernels.cpu.machine import (
    FLOAT_BYTES,
    HALF_BYTES,
    LANES,
    LOG2_E,
    PAIR,
    TILE_ROWS,
    VECTOR_BYTES,
    knows_avx512,
    knows_bf16,
    knows_vnni,
)

STORE, ADD, GATE = range(3)
FINISH_ROWS = 4
"""Rows that are finished side by side. Sums and factors of this many rows are read, even past the last row."""

_ROWS_AT_MEMORY_SPEED = 2
_ROWS_IN_REGISTERS = 8  # with more rows in a tile, LLVM runs out of registers


class TileProduct(NamedTuple):
    """out = a @ b. The step of `b` is from panel to panel."""

    a: Matrix
    b: Matrix
    out: Matrix


class _Arithmetic(NamedTuple):
    """How weights of a type are multiplied: the type of sums, the instructions for a row of `a` (one that adds if
    `multiply` does not), and how much a pass of the innermost loop takes: bytes of a panel, and numbers of 4 bytes in a
    row of `a`.
    """

    sums: LLVMType
    read: str
    multiply: str
    add: str = ""
    panel_bytes: int = VECTOR_BYTES
    numbers: int = 1


_BYTES = _Arithmetic(INTS, "vpbroadcastd", "vpdpbusd")
_PAIRS = _Arithmetic(FLOATS, "vbroadcastss", "vdpbf16ps")
_FLOATS = _Arithmetic(FLOATS, "vbroadcastss", "vfmadd231ps")
_HALVES = _FLOATS._replace(panel_bytes=LANES * HALF_BYTES)
_OCTETS = _FLOATS._replace(panel_bytes=LANES)
_WIDENED_PAIRS = _FLOATS._replace(numbers=PAIR)
_WIDENED_BYTES = _Arithmetic(INTS, "vpbroadcastd", "vpmaddwd", "vpaddd", numbers=PAIR)


def _arithmetic(element: NumbaType) -> _Arithmetic:
    if element == types.int16:
        return _PAIRS if knows_bf16() else _WIDENED_PAIRS
    if element == types.int8:
        return _BYTES if knows_vnni() else _WIDENED_BYTES
    return {types.uint16: _HALVES, types.boolean: _OCTETS}.get(element, _FLOATS)


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

    `rows` and `panels` are compile-time constants. `element` is any element of b. `depth` counts numbers of 4 bytes in
    a row of `a`: for int8 groups of 4 unsigned bytes, or pairs without VNNI; for bf16 pairs on a CPU that multiplies
    it; else fp32.
    """
    size = rows.literal_value, panels.literal_value

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        write_tile(Emitter(context, builder), args[0], args[1], size, element)
        return context.get_dummy_value()

    return types.void(matrices, types.intp, rows, panels, element), generate


def write_tile(
    emit: Emitter,
    product: Value,
    depth: Value,
    size: tuple[int, int],
    element: NumbaType,
    ahead: Value | None = None,
) -> None:
    """Write the code of `multiply_tile` for a size of (rows, panels). Meanwhile the weights that lie `ahead` bytes
    further are prefetched.
    """
    (num_rows, num_panels), arithmetic, builder = size, _arithmetic(element), emit.builder
    (a_at, a_step), (b_at, b_step), (out_at, out_step) = (emit.matrix(m) for m in emit.members(product, 3))
    num_passes = builder.udiv(depth, INT64(arithmetic.numbers))
    # A core has fewer requests under way into its nearest cache than into the next one. They are enough for one or two
    # rows of fp32 or bf16, as measured (docs/performance-notes.md), and bring these weights nearer.
    to_l2 = num_rows > _ROWS_AT_MEMORY_SPEED or arithmetic.sums is INTS
    for some_rows, some_panels in _parts_in_registers(num_rows, num_panels, arithmetic):
        zeros = [constant(arithmetic.sums, 0)] * (len(some_rows) * len(some_panels))
        with emit.loop(num_passes, zeros) as loop:
            b_row = builder.mul(loop.index, INT64(arithmetic.panel_bytes))
            panels_at = [emit.at(b_at, builder.add(b_row, builder.mul(b_step, INT64(j)))) for j in some_panels]
            a_column = emit.at(a_at, builder.mul(loop.index, INT64(arithmetic.numbers * FLOAT_BYTES)))
            loop.next[:] = loop.carried
            for at in panels_at if ahead is not None and some_rows.start == 0 else ():
                emit.prefetch(emit.at(at, ahead), to_l2=to_l2)
            for number in range(arithmetic.numbers):
                columns = [_weights(emit, at, arithmetic, number) for at in panels_at]
                a = emit.at(a_column, number * FLOAT_BYTES), a_step
                loop.next[:] = _multiply_column(emit, arithmetic, a, some_rows, columns, loop.next)
        places = ((row, panel) for row in some_rows for panel in some_panels)
        for total, (row, panel) in zip(loop.next, places, strict=True):
            row_at = builder.mul(out_step, INT64(row))
            emit.store(total, emit.at(out_at, builder.add(row_at, INT64(panel * VECTOR_BYTES))))


def _weights(emit: Emitter, at: Value, arithmetic: _Arithmetic, number: int) -> Value:
    """The weights of 16 columns that are multiplied with a row's number `number` of a pass."""
    if arithmetic is _HALVES:
        return emit.floats(at, types.uint16)
    if arithmetic is _OCTETS:
        return emit.floats(at, types.boolean)
    weights, builder = emit.load(at, arithmetic.sums), emit.builder
    if arithmetic is _WIDENED_BYTES:
        return emit.odd_bytes(weights) if number else emit.even_bytes(weights)
    if arithmetic is not _WIDENED_PAIRS:
        return weights
    bits = builder.bitcast(weights, INTS)
    widened = builder.and_(bits, constant(INTS, -(2**16))) if number else builder.shl(bits, constant(INTS, 16))
    return builder.bitcast(widened, FLOATS)


@emitted
def widen_panels(
    typing: TypingContext, packed: NumbaType, num_bytes: NumbaType, out: NumbaType, element: NumbaType
) -> Intrinsic:
    """Convert panels to panels of fp32, with the numbers that `multiply_tile` makes of them in registers.

    `num_bytes`: of the panels, which lie one behind the other. `element` is any element of them.
    """
    arithmetic = _arithmetic(element)

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        packed_at, out_at = emit.pointer(args[0]), emit.pointer(args[2])
        with emit.loop(builder.udiv(args[1], INT64(arithmetic.panel_bytes)), []) as loop:
            at = emit.at(packed_at, builder.mul(loop.index, INT64(arithmetic.panel_bytes)))
            target = emit.at(out_at, builder.mul(loop.index, INT64(arithmetic.numbers * VECTOR_BYTES)))
            for number in range(arithmetic.numbers):
                emit.store(_weights(emit, at, arithmetic, number), emit.at(target, number * VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3, element), generate


def _parts_in_registers(num_rows: int, num_panels: int, arithmetic: _Arithmetic) -> list[tuple[range, range]]:
    """Rows and panels of the parts of a tile whose sums fit into the CPU's registers, beside the operands."""
    if knows_avx512():
        max_rows, max_panels = TILE_ROWS, num_panels
    else:
        max_rows, max_panels = 6, (num_panels if num_rows <= 2 and arithmetic.sums is FLOATS else 1)
    size = -(-num_rows // -(-num_rows // max_rows))
    row_parts = [range(first, min(num_rows, first + size)) for first in range(0, num_rows, size)]
    panel_parts = [range(first, first + max_panels) for first in range(0, num_panels, max_panels)]
    return [(some_rows, some_panels) for some_rows in row_parts for some_panels in panel_parts]


def _multiply_column(
    emit: Emitter,
    arithmetic: _Arithmetic,
    a: tuple[Value, Value],
    rows: range,
    columns: list[Value],
    totals: list[Value],
) -> list[Value]:
    """totals + a[row] * columns for each of the rows. `a`: a pointer at a number of row 0, and the step."""
    at, step = a
    following: list[Value] = []
    for i, row in enumerate(rows):
        of_row = totals[i * len(columns) : (i + 1) * len(columns)]
        if len(rows) > _ROWS_IN_REGISTERS or arithmetic.add:
            first = row - row % 3  # x86 addresses reach rows 0, 1 and 2 from one pointer
            first_at = emit.at(at, emit.builder.mul(step, INT64(first)))
            following += _multiply_row(emit, arithmetic, (first_at, step), row - first, columns, of_row)
            continue
        row_at = emit.at(at, emit.builder.mul(step, INT64(row)))
        left = emit.splat(emit.load(row_at, arithmetic.sums.element))
        for right, total in zip(columns, of_row, strict=True):
            if arithmetic is _BYTES:
                following.append(emit.dot_bytes(total, left, right))
            elif arithmetic is _PAIRS:
                following.append(emit.dot_bf16(total, left, right))
            else:
                following.append(emit.multiply_add(left, right, total))
    return following


def _multiply_row(
    emit: Emitter,
    arithmetic: _Arithmetic,
    a: tuple[Value, Value],
    row: int,
    columns: list[Value],
    totals: list[Value],
) -> list[Value]:
    """totals + a[row] * columns, for `row` 0 to 2.

    It is assembly because LLVM would read the numbers of many rows first, and spill them in the innermost loop.
    """
    weights, sums = ([part for whole in values for part in emit.registers(whole)] for values in (columns, totals))
    count, vector = len(sums), sums[0].type
    num_results = count + (2 if arithmetic.add else 1)  # sums, the number, and a product that is to be added
    number, product, pointer = count, count + 1, num_results + count
    at = f"(${pointer}" + ("", f",${pointer + 1}", f",${pointer + 1},2")[row] + ")"
    code = [f"{arithmetic.read} {at}, ${number}"]
    for i, weight in enumerate(range(num_results, pointer)):
        code.append(f"{arithmetic.multiply} ${weight}, ${number}, ${product if arithmetic.add else i}")
        if arithmetic.add:
            code.append(f"{arithmetic.add} ${product}, ${i}, ${i}")
    register = "v" if knows_avx512() else "x"
    operands = [f"=&{register}"] * num_results + [register] * count + ["r", "r"] + [str(i) for i in range(count)]
    kinds = [vector] * count + [BYTE_POINTER, INT64] + [vector] * count
    results = emit.builder.asm(
        ir.FunctionType(ir.LiteralStructType([vector] * num_results), kinds),
        "\n".join(code),
        ",".join([*operands, "~{memory}"]),
        [*weights, *a, *sums],
        True,
    )
    parts, per_vector = emit.members(results, count), count // len(totals)
    return [emit.joined(parts[i : i + per_vector]) for i in range(0, count, per_vector)]


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
        """Write code that finishes up to FINISH_ROWS rows from `first` on; with AVX-512 without a branch."""
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
            emit.store_if(exists, gated_silu(emit, low, high), out)
            return
        adds = self._mode == ADD
        emit.store_if(exists, low, out, adds=adds)
        emit.store_if(builder.and_(exists, self._has_both_panels), high, emit.at(out, VECTOR_BYTES), adds=adds)

    def _scaled(self, sums: Value, factor: Value, panel: int) -> Value:
        """(sum - offset) * scale * factor + bias."""
        emit, builder = self._emit, self._emit.builder
        offsets, scales, biases = self._columns[panel]
        total = emit.load(sums, INTS if self._is_int8 else FLOATS)
        if self._is_int8:
            total = builder.sitofp(builder.sub(total, offsets) if knows_vnni() else total, FLOATS)
        return emit.multiply_add(total, builder.fmul(scales, factor), biases)


def gated_silu(emit: Emitter, gate: Value, up: Value) -> Value:
    """silu(gate) * up, of vectors of 16 fp32 numbers."""
    return sigmoid_of(emit, gate, emit.builder.fmul(gate, up))


def sigmoid_of(emit: Emitter, x: Value, factor: Value) -> Value:
    """factor / (1 + e^-x)."""
    builder = emit.builder
    exponent = builder.fmul(x, constant(FLOATS, -LOG2_E))
    exponent = emit.call("llvm.minnum.v16f32", FLOATS, exponent, constant(FLOATS, 126.0))
    divisor = builder.fadd(emit.power_of_two(exponent), constant(FLOATS, 1.0))
    return builder.fmul(factor, emit.reciprocal(divisor))


@emitted
def finish_rows(typing: TypingContext, tile: NumbaType, mode: NumbaType, element: NumbaType) -> Intrinsic:
    """Finish all rows of a SumTile. `mode` is a compile-time constant, `element` any element of the weights."""
    is_int8 = element == types.int8

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        finish = Finish(Emitter(context, builder), args[0], mode.literal_value, is_int8=is_int8)
        finish.remaining(INT64(0))
        return context.get_dummy_value()

    return types.void(tile, mode, element), generate
