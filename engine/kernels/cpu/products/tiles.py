"""Matrix tiles in registers: the innermost loops of matrix products on vector units. `finish.py` has their end.

B is packed in panels of 16 columns: fp32 and fp16 as [depth][16], bf16 as [depth / 2][16][2], int8 as
[depth / 4][16][4]. All CPUs, and AMX (`amx.py`), read this layout, so one packed weight serves batches of all sizes.
fp16 becomes fp32 in registers, which is exact: results are those of the same numbers in fp32. So does bf16, unless the
CPU multiplies bf16 itself; then A is rounded to bf16, too. Bounds are not checked.

fp8 has a scale for each group of inputs. A panel is [groups][16] scales in fp32, then [depth][16] bytes. They become
fp32 divided by FP8_FACTOR, which is part of the scales, and are multiplied by these in registers: results are those of
the dequantised numbers in fp32, to the bit. Other units of such a model are in bf16 or fp32; A is in fp32 for all of
them. Weights in steps of int8 become int8 in registers (`steps.py`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llvmlite import ir
from numba import types

from engine.kernels.cpu.arguments import Matrix
from engine.kernels.cpu.compilation.emitter import (
    BYTE_POINTER,
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
    IN_BF16,
    IN_FP32,
    LANES,
    PAIR,
    PANEL,
    TILE_ROWS,
    VECTOR_BYTES,
    knows_avx512,
    knows_bf16,
    knows_vnni,
)

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
_STEPPED_BYTES = _BYTES._replace(numbers=2)
_STEPPED_WIDENED_BYTES = _WIDENED_BYTES._replace(numbers=2 * PAIR)


def _arithmetic(element: NumbaType) -> _Arithmetic:
    if element == types.int16:
        return _PAIRS if knows_bf16() else _WIDENED_PAIRS
    if element == types.int8:
        return _BYTES if knows_vnni() else _WIDENED_BYTES
    if element == types.int64:
        return _STEPPED_BYTES if knows_vnni() else _STEPPED_WIDENED_BYTES
    return {types.uint16: _HALVES, types.boolean: _OCTETS, types.uint32: _WIDENED_PAIRS}.get(element, _FLOATS)


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
    ahead: Sequence[Value] = (),
    group: Value | None = None,
    add_all: "AddAll | None" = None,
) -> None:
    """Write the code of `multiply_tile` for a size of (rows, panels). Meanwhile weights are prefetched, for each panel
    those that lie its number of `ahead` in bytes further. `group`: inputs that share a scale, of fp8. `add_all`: adds
    the products of all inputs, of weights in steps of int8.
    """
    (num_rows, num_panels), arithmetic, builder = size, _arithmetic(element), emit.builder
    (a_at, a_step), (b_at, b_step), (out_at, out_step) = (emit.matrix(m) for m in emit.members(product, 3))
    # A core has fewer requests under way into its nearest cache than into the next one. They are enough for one or two
    # rows of fp32 or bf16, as measured (docs/performance-notes.md), and bring these weights nearer.
    to_l2 = num_rows > _ROWS_AT_MEMORY_SPEED or arithmetic.sums is INTS
    for some_rows, some_panels in _parts_in_registers(num_rows, num_panels, arithmetic):
        zeros = [constant(arithmetic.sums, 0)] * (len(some_rows) * len(some_panels))
        panels_at = [emit.at(b_at, builder.mul(b_step, INT64(j))) for j in some_panels]
        prefetched = [ahead[j] for j in some_panels] if ahead and some_rows.start == 0 else []
        part = TilePart(arithmetic, (a_at, a_step), some_rows, prefetched, to_l2)
        if add_all is not None:
            totals = add_all(emit, part, depth, panels_at, zeros)
        elif group is None:
            totals = add_passes(emit, part, builder.udiv(depth, INT64(arithmetic.numbers)), panels_at, zeros)
        else:
            totals = _add_groups(emit, part, (depth, group), panels_at, zeros)
        places = ((row, panel) for row in some_rows for panel in some_panels)
        for total, (row, panel) in zip(totals, places, strict=True):
            row_at = builder.mul(out_step, INT64(row))
            emit.store(total, emit.at(out_at, builder.add(row_at, INT64(panel * VECTOR_BYTES))))


class TilePart(NamedTuple):
    """Some rows of a tile. `a`: a pointer at row 0, and the step; `ahead` and `to_l2`: where to prefetch, and how."""

    arithmetic: _Arithmetic
    a: tuple[Value, Value]
    rows: range
    ahead: list[Value]
    to_l2: bool


AddAll = Callable[[Emitter, TilePart, Value, list[Value], list[Value]], list[Value]]
"""As `add_passes`, with the depth in place of the count."""
ReadWeights = Callable[[int, Value, int], Value]
"""The weights of a panel, by its number in the tile, where they are, and the number of a row that they multiply."""


def _add_groups(
    emit: Emitter, part: TilePart, sizes: tuple[Value, Value], panels_at: list[Value], totals: list[Value]
) -> list[Value]:
    """As `add_passes`, of all groups of panels in fp8. `sizes`: the depth, and the inputs that share a scale."""
    builder, (depth, group), (a_at, a_step) = emit.builder, sizes, part.a
    num_groups = builder.udiv(builder.add(depth, builder.sub(group, INT64(1))), group)
    weights_at = [emit.vector_at(at, num_groups) for at in panels_at]
    with emit.loop(num_groups, totals) as loop:
        first = builder.mul(loop.index, group)
        left = builder.sub(depth, first)
        count = builder.select(builder.icmp_signed("<", left, group), left, group)
        scales = [emit.load(emit.vector_at(at, loop.index), FLOATS) for at in panels_at]
        own = part._replace(a=(emit.at(a_at, builder.mul(first, INT64(FLOAT_BYTES))), a_step))
        now_at = [emit.at(at, builder.mul(first, INT64(LANES))) for at in weights_at]

        def scaled(panel: int, at: Value, number: int, scales: list[Value] = scales) -> Value:
            return emit.product(_weights(emit, at, part.arithmetic, number), scales[panel])

        loop.next = add_passes(emit, own, count, now_at, loop.carried, scaled)
    return loop.next


def add_passes(
    emit: Emitter,
    part: TilePart,
    count: Value,
    panels_at: list[Value],
    totals: list[Value],
    weights: "ReadWeights | None" = None,
) -> list[Value]:
    """The K loop: totals [rows * panels] and the products of `count` passes. `weights`: see ReadWeights."""
    (arithmetic, (a_at, a_step), rows, ahead, to_l2), builder = part, emit.builder
    with emit.loop(count, totals) as loop:
        b_row = builder.mul(loop.index, INT64(arithmetic.panel_bytes))
        now_at = [emit.at(at, b_row) for at in panels_at]
        a_column = emit.at(a_at, builder.mul(loop.index, INT64(arithmetic.numbers * FLOAT_BYTES)))
        loop.next[:] = loop.carried
        for at, distance in zip(now_at if ahead else [], ahead, strict=True):
            emit.prefetch(emit.at(at, distance), to_l2=to_l2)
        for number in range(arithmetic.numbers):
            if weights is None:
                columns = [_weights(emit, at, arithmetic, number) for at in now_at]
            else:
                columns = [weights(panel, at, number) for panel, at in enumerate(now_at)]
            a = emit.at(a_column, number * FLOAT_BYTES), a_step
            loop.next[:] = _multiply_column(emit, arithmetic, a, rows, columns, loop.next)
    return loop.next


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
    typing: TypingContext,
    packed: NumbaType,
    num_bytes: NumbaType,
    scales: NumbaType,
    out: NumbaType,
    element: NumbaType,
) -> Intrinsic:
    """Convert panels to panels of fp32, with the numbers that `multiply_tile` makes of them in registers.

    `num_bytes`: of the panels, which lie one behind the other. `scales`: of the columns, for fp8; else not read.
    `element` is any element of the panels.
    """
    arithmetic = _arithmetic(element)

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        packed_at, scales_at, out_at = emit.pointer(args[0]), emit.pointer(args[2]), emit.pointer(args[3])
        scales = emit.load(scales_at, FLOATS) if arithmetic is _OCTETS else None
        with emit.loop(builder.udiv(args[1], INT64(arithmetic.panel_bytes)), []) as loop:
            at = emit.at(packed_at, builder.mul(loop.index, INT64(arithmetic.panel_bytes)))
            target = emit.at(out_at, builder.mul(loop.index, INT64(arithmetic.numbers * VECTOR_BYTES)))
            for number in range(arithmetic.numbers):
                widened = _weights(emit, at, arithmetic, number)
                widened = widened if scales is None else emit.product(widened, scales)
                emit.store(widened, emit.at(target, number * VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4, element), generate


def form_bytes(depth: int, form: int) -> int:
    """Bytes of a panel of so many inputs in a model in fp8."""
    if form == IN_FP32:
        return depth * PANEL * FLOAT_BYTES
    if form == IN_BF16:
        return depth * PANEL * HALF_BYTES
    return (depth + form - 1) // form * VECTOR_BYTES + depth * PANEL


def _parts_in_registers(num_rows: int, num_panels: int, arithmetic: _Arithmetic) -> list[tuple[range, range]]:
    """Register blocking: rows and panels of the parts of a tile whose sums fit into the CPU's registers, beside the
    operands.
    """
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
            if arithmetic in (_BYTES, _STEPPED_BYTES):
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
