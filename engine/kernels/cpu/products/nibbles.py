"""Products of bytes and weights of 4 bits, which are unpacked in registers, and of 8 bits beside them.

A group is 32, 64 or 128 inputs. A weight of 4 bits, 0 to 15, means `(weight - zero) * scale`, where each column has a
zero and a scale for every group. A row of the left operand is one block for each group: the scale of its activations in
fp32, minus their sum in int32 (with VNNI MAX_ZERO times that), and the activations as signed bytes, with zeros
behind the row's last.

A zero takes zero * sum of a row's products. Without VNNI each row and column has a multiplication for it. With VNNI
weights of 4 bits are raised by MAX_ZERO - zero when they are unpacked, and then all columns of a row have the same
to take, which the row's block holds.

A panel of 16 columns begins with its scales and zeros: for each group 16 fp16 and 16 bytes, padded to whole cache
lines. Then come the weights as [inputs / 8][16][4] bytes: of 8 inputs, the low halves of a column's 4 bytes hold the
first 4 and the high halves the others. So 4 inputs of a column fill a lane after one mask, as in `tiles.py`.

4 bits may have minima, numbers of fp16, in place of zeros: `weight * scale - minimum`, in groups of 32. The minimum
times the sum of a row's activations is taken in fp32. The 16 minima of a group follow its 16 scales.

In MXFP4 (engine/quantized_formats/mxfp4.py) 4 bits are the number of a level in E2M1_LEVELS. A weight is `(level - 12)
* scale`, and 12 is the zero of every group. The levels are looked up in a register as they are unpacked. In NF4
(engine/quantized_formats/bitsandbytes.py) it is that of a level in NF4_LEVELS, whose zero is 128. Without VNNI products
of such levels do not fit into 16 bits, so their halves are looked up and multiplied apart.

Matrices that a checkpoint in 4 bits leaves in floating point have 8: a weight of 0 to 255 means `(weight - 128) *
scale`. Their weights lie as [inputs / 4][16][4] bytes.

Sums within a group are exact integers on every CPU. They are scaled and added up in fp32 in the order of the groups,
so that results depend neither on the tile nor on the CPU.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from llvmlite import ir

from engine.kernels.cpu.compilation.emitter import FLOAT, HALF, INT8, INT32, INT64, Emitter, Value
from engine.kernels.cpu.machine import (
    BLOCK_HEAD_BYTES,
    CACHE_LINE_BYTES,
    EIGHT_BITS,
    FLOAT_BYTES,
    FOUR_BITS,
    HALF_BYTES,
    LANES,
    MAX_ZERO,
    MXFP4,
    NF4,
    PANEL,
    QUAD,
    VECTOR_BYTES,
    WITH_MINIMA,
    ZERO_BITS,
    knows_avx512,
    knows_vnni,
)
from engine.kernels.cpu.products.nibble_numbers import E2M1_LEVELS, E2M1_ZERO, NF4_LEVELS, bytes_per_input, scales_bytes

_STEP = 32
"""Inputs of a pass of the innermost loop. Without VNNI their products are added up in 16 bits, which cannot overflow:
2 * 15 * 127 * (_STEP / 4) < 2^15. Of levels of MXFP4 half as many are added up: 2 * 24 * 127 * (_STEP / 8) < 2^15.
"""
_NF4_ZERO_BITS = 7
_NF4_HALVES = tuple(level & 15 for level in NF4_LEVELS), tuple(level >> 4 for level in NF4_LEVELS)
"""The low bits of the levels, and the high ones."""


class _Vectors:
    """Writes operations on vectors of one register: 16 lanes with AVX-512, else 8."""

    def __init__(self, emit: Emitter) -> None:
        self.emit, self.lanes = emit, LANES if knows_avx512() else LANES // 2
        self.ints, self.floats, self._halves, self._octets = (
            ir.VectorType(kind, self.lanes) for kind in (INT32, FLOAT, HALF, INT8)
        )
        self.pairs = ir.VectorType(ir.IntType(16), 2 * self.lanes)
        self.bytes = ir.VectorType(INT8, QUAD * self.lanes)
        self.nothing = ir.Constant(self.floats, [0.0] * self.lanes)

    def splat(self, scalar: Value) -> Value:
        vector = ir.VectorType(scalar.type, self.lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.emit.builder.insert_element(undefined, scalar, INT32(0))
        return self.emit.builder.shuffle_vector(first, undefined, ir.Constant(self.ints, [0] * self.lanes))

    def nibbles(self, at: Value) -> tuple[Value, Value]:
        """The low halves of the bytes at an address, and the high ones, as bytes: of 4 bits, the weights of 8 inputs, 4
        of them in each lane.
        """
        builder, mask = self.emit.builder, ir.Constant(self.bytes, [15] * QUAD * self.lanes)
        packed = self.emit.load(at, self.ints, 4)
        high = builder.lshr(packed, ir.Constant(self.ints, [4] * self.lanes))
        low, high = (builder.and_(builder.bitcast(bits, self.bytes), mask) for bits in (packed, high))
        return low, high

    def looked_up(self, levels: Sequence[int], numbers: Value) -> Value:
        """The bytes of `levels`, of which there are 16, with these numbers."""
        table = ir.Constant(self.bytes, list(levels) * (QUAD * self.lanes // len(levels)))
        name = "llvm.x86.avx512.pshuf.b.512" if knows_avx512() else "llvm.x86.avx2.pshuf.b"
        return self.emit.call(name, self.bytes, table, numbers)

    def scales(self, at: Value) -> Value:
        return self.emit.builder.fpext(self.emit.load(at, self._halves, 2), self.floats)

    def zeros(self, at: Value) -> Value:
        return self.emit.builder.zext(self.emit.load(at, self._octets, 1), self.ints)

    def rises(self, zeros: Value) -> Value:
        """MAX_ZERO minus these zeros, for each of the bytes of `nibbles`: weights of 4 bits are raised by it."""
        lanes, size = self.emit.builder.bitcast(zeros, self.bytes), QUAD * self.lanes
        places = ir.Constant(ir.VectorType(INT32, size), [byte // QUAD * QUAD for byte in range(size)])
        repeated = self.emit.builder.shuffle_vector(lanes, ir.Constant(self.bytes, ir.Undefined), places)
        return self.emit.builder.sub(ir.Constant(self.bytes, [MAX_ZERO] * size), repeated)

    def dot_pairs(self, left: Value, right: Value) -> Value:
        """The sum of the products of each lane's two int16."""
        name = "llvm.x86.avx512.pmaddw.d.512" if knows_avx512() else "llvm.x86.avx2.pmadd.wd"
        left, right = (self.emit.builder.bitcast(lanes, self.pairs) for lanes in (left, right))
        return self.emit.call(name, self.ints, left, right)

    def multiply(self, total: Value | None, weights: Value, activations: Value) -> Value:
        """total + the products of 4 bytes in each lane: int32 with VNNI, else int16, two in a lane."""
        builder = self.emit.builder
        if knows_vnni():
            name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
            return self.emit.call(name, self.ints, total, builder.bitcast(weights, self.ints), activations)
        name = "llvm.x86.avx512.pmaddubs.w.512" if knows_avx512() else "llvm.x86.avx2.pmadd.ub.sw"
        products = self.emit.call(name, self.pairs, weights, builder.bitcast(activations, self.bytes))
        return products if total is None else builder.add(total, products)

    def widened(self, sums: Value, total: Value, factor: int = 1) -> Value:
        """`sums` of `multiply`: with `total` in them if they are int32; else, in int16, total + factor * sums."""
        if knows_vnni():
            return sums
        factors = ir.Constant(self.pairs, [factor] * 2 * self.lanes)
        return self.emit.builder.add(total, self.dot_pairs(sums, factors))

    def add_scaled(self, exact: Value, factor: Value, scale: Value, total: Value) -> Value:
        """total + exact * factor * scale, never reordered."""
        value = self.emit.builder.sitofp(exact, self.floats)
        value = self.emit.builder.fmul(value, factor, flags=("nsz",))
        return self.emit.call(f"llvm.fma.v{self.lanes}f32", self.floats, value, scale, total)


def write_nibble_tile(
    emit: Emitter, product: Value, a_step: Value, group: Value, size: tuple[int, int], ahead: Value, numbers: int
) -> None:
    """Write code that computes out[rows, panels * 16] = a @ b of a TileProduct, with fp32 sums, for a size of (rows,
    panels). Meanwhile the weights that lie `ahead` bytes further are prefetched. `group`: inputs that share a scale;
    `numbers`: what the numbers are.
    """
    builder = emit.builder
    num_groups = builder.udiv(a_step, builder.add(group, INT64(BLOCK_HEAD_BYTES)))
    tile = _Tile(emit, product, num_groups, group, ahead)
    per_panel = LANES // tile.vectors.lanes
    parts = [
        (some_rows, [_Column(*divmod(number, per_panel)) for number in some_columns])
        for some_rows, some_columns in _parts_in_registers(size[0], size[1] * per_panel)
    ]

    def multiply(*, is_one_step: bool) -> None:
        for some_rows, some_columns in parts:
            tile.multiply(some_rows, some_columns, numbers, is_one_step=is_one_step)

    if numbers != FOUR_BITS:
        multiply(is_one_step=numbers in (MXFP4, WITH_MINIMA))
        return
    with builder.if_else(builder.icmp_signed("==", group, INT64(_STEP))) as (is_single, has_several):
        with is_single:
            multiply(is_one_step=True)
        with has_several:
            multiply(is_one_step=False)


def _parts_in_registers(num_rows: int, num_vectors: int) -> list[tuple[range, range]]:
    """Rows and vectors of columns of the parts of a tile whose sums fit into the CPU's registers."""
    max_sums = 12 if knows_avx512() else 4
    size = -(-num_rows // -(-num_rows // max_sums))
    at_once = max_sums // size if num_rows > 1 else 2
    row_parts = [range(first, min(num_rows, first + size)) for first in range(0, num_rows, size)]
    vector_parts = [range(first, min(num_vectors, first + at_once)) for first in range(0, num_vectors, at_once)]
    return [(some_rows, some_vectors) for some_vectors in vector_parts for some_rows in row_parts]


_Step = Callable[..., list[Value]]
"""Adds the products of _STEP inputs: see `_Tile._step`."""


class _Column(NamedTuple):
    """A vector of columns: number `part` of a panel."""

    panel: int
    part: int


class _Tile:
    """Writes the code of a tile."""

    def __init__(self, emit: Emitter, product: Value, num_groups: Value, group: Value, ahead: Value) -> None:
        self._emit, self.vectors, self._ahead = emit, _Vectors(emit), ahead
        self._a, self._b, self._out = (emit.matrix(matrix) for matrix in emit.members(product, 3))
        self._count, self._size = num_groups, group

    def multiply(self, rows: range, columns: list[_Column], numbers: int, *, is_one_step: bool) -> None:
        """Compute some rows of some columns. `is_one_step`: a group is one step."""
        emit, builder, vectors = self._emit, self._emit.builder, self.vectors
        prefetches = rows.start == 0 and columns[0].part == 0
        rows_at = [emit.at(self._a[0], builder.mul(self._a[1], INT64(row))) for row in rows]
        with emit.loop(self._count, [vectors.nothing] * (len(rows) * len(columns))) as loop:
            block = builder.mul(loop.index, builder.add(self._size, INT64(BLOCK_HEAD_BYTES)))
            blocks_at = [emit.at(at, block) for at in rows_at]
            scales, zeros, weights_at = self._columns(columns, loop.index, numbers, prefetches=prefetches)
            sums, rises = self._without_zeros(blocks_at, zeros, numbers)
            inputs_at = [emit.at(at, BLOCK_HEAD_BYTES) for at in blocks_at]
            multiply = self._step_of(numbers, rises)
            if is_one_step:
                sums = multiply(inputs_at, weights_at, sums, prefetches=prefetches)
            else:
                with emit.loop(builder.udiv(self._size, INT64(_STEP)), sums) as steps:
                    a_offset = builder.mul(steps.index, INT64(_STEP))
                    b_offset = builder.mul(steps.index, INT64(_STEP * bytes_per_input(numbers)))
                    now = [emit.at(at, a_offset) for at in inputs_at], [emit.at(at, b_offset) for at in weights_at]
                    steps.next = multiply(*now, steps.carried, prefetches=prefetches)
                sums = steps.next
            factors = [vectors.splat(emit.load(at, FLOAT)) for at in blocks_at]
            pairs = [(factor, scale) for factor in factors for scale in scales]
            totals = loop.carried
            if numbers == WITH_MINIMA:
                totals = self._without_minima(blocks_at, factors, zeros, totals)
            for (factor, scale), exact, total in zip(pairs, sums, totals, strict=True):
                loop.next.append(vectors.add_scaled(exact, factor, scale, total))
        self._store(rows, columns, loop.next)

    def _without_zeros(
        self, blocks_at: list[Value], zeros: list[Value], numbers: int
    ) -> tuple[list[Value], list[Value]]:
        """Sums [rows * columns] with nothing in them but what the zeros take, and what weights of the columns are
        raised by, if they are.
        """
        vectors = self.vectors
        if numbers == WITH_MINIMA:
            return [ir.Constant(vectors.ints, [0] * vectors.lanes)] * (len(blocks_at) * len(zeros)), []
        if knows_vnni() and numbers != EIGHT_BITS:
            shifts = self._shifts(blocks_at)
            if numbers == NF4:
                shifts = [self._emit.builder.shl(shift, INT32(_NF4_ZERO_BITS - ZERO_BITS)) for shift in shifts]
            sums = [vectors.splat(shift) for shift in shifts for _ in zeros]
            return sums, [vectors.rises(zero) for zero in zeros] if numbers == FOUR_BITS else []
        return [vectors.dot_pairs(zero, sums) for sums in self._minus_sums(blocks_at) for zero in zeros], []

    def _without_minima(
        self, blocks_at: list[Value], factors: list[Value], minima: list[Value], totals: list[Value]
    ) -> list[Value]:
        """totals [rows * columns], without what a group's minima take."""
        rows = zip(self._minus_sums(blocks_at), factors, strict=True)
        taken = [(sums, factor, minimum) for sums, factor in rows for minimum in minima]
        return [self.vectors.add_scaled(*each, total) for each, total in zip(taken, totals, strict=True)]

    def _shifts(self, blocks_at: list[Value]) -> list[Value]:
        """Minus the sum of each block, with VNNI MAX_ZERO times."""
        return [self._emit.load(self._emit.at(at, FLOAT_BYTES), INT32) for at in blocks_at]

    def _minus_sums(self, blocks_at: list[Value]) -> list[Value]:
        """Minus the sum of each block, in all lanes."""
        shifts = self._shifts(blocks_at)
        if knows_vnni():
            shifts = [self._emit.builder.ashr(shift, INT32(ZERO_BITS)) for shift in shifts]
        return [self.vectors.splat(shift) for shift in shifts]

    def _columns(
        self, columns: list[_Column], group: Value, numbers: int, *, prefetches: bool
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Of group number `group` the scales, the zeros or minima, and where the weights are."""
        emit, builder, lanes = self._emit, self._emit.builder, self.vectors.lanes
        scales_size = INT64(scales_bytes(numbers))
        head, heads = (builder.mul(count, scales_size) for count in (group, self._count))
        heads = builder.and_(builder.add(heads, INT64(CACHE_LINE_BYTES - 1)), INT64(-CACHE_LINE_BYTES))
        first = builder.mul(group, builder.mul(self._size, INT64(bytes_per_input(numbers))))
        first = builder.add(heads, first)
        scales, zeros, weights_at = [], [], []
        for panel, part in columns:
            panel_at = emit.at(self._b[0], builder.mul(self._b[1], INT64(panel)))
            head_at = emit.at(panel_at, head)
            if prefetches and part == 0:
                emit.prefetch(emit.at(head_at, self._ahead), to_l2=True)
            scales.append(self.vectors.scales(emit.at(head_at, part * lanes * HALF_BYTES)))
            if numbers == WITH_MINIMA:
                zeros.append(self.vectors.scales(emit.at(head_at, (PANEL + part * lanes) * HALF_BYTES)))
            else:
                zeros.append(self.vectors.zeros(emit.at(head_at, PANEL * HALF_BYTES + part * lanes)))
            weights_at.append(emit.at(emit.at(panel_at, first), part * lanes * QUAD))
        return scales, zeros, weights_at

    def _step_of(self, numbers: int, rises: list[Value]) -> _Step:
        if numbers == EIGHT_BITS:
            return self._step_of_bytes
        if numbers == NF4:
            return partial(self._step, rises=[], levels=NF4_LEVELS) if knows_vnni() else self._step_of_halves
        if numbers == MXFP4:
            rise = MAX_ZERO - E2M1_ZERO if knows_vnni() else 0
            return partial(self._step, rises=[], levels=[level + rise for level in E2M1_LEVELS])
        return partial(self._step, rises=rises, levels=())

    def _step(
        self,
        inputs_at: list[Value],
        weights_at: list[Value],
        totals: list[Value],
        *,
        prefetches: bool,
        rises: list[Value],
        levels: Sequence[int],
    ) -> list[Value]:
        """totals [rows * columns] and the products of _STEP inputs. Weights number the `levels`, if there are any."""
        emit, vectors = self._emit, self.vectors
        prefetched_at = weights_at[:: LANES // vectors.lanes] if prefetches else []
        sums: list[Value | None] = [*totals] if knows_vnni() else [None] * len(totals)
        num_octets = _STEP // (2 * QUAD)
        for octet in range(num_octets):
            columns = [vectors.nibbles(emit.at(at, octet * VECTOR_BYTES)) for at in weights_at]
            if levels:
                columns = [(vectors.looked_up(levels, low), vectors.looked_up(levels, high)) for low, high in columns]
            elif rises:
                add, pairs = emit.builder.add, zip(columns, rises, strict=True)
                columns = [(add(low, rise), add(high, rise)) for (low, high), rise in pairs]
            for at in prefetched_at:
                emit.prefetch(emit.at(emit.at(at, self._ahead), octet * VECTOR_BYTES), to_l2=True)
            for row, at in enumerate(inputs_at):
                fours_at = [emit.at(at, QUAD * (2 * octet + half)) for half in range(2)]
                fours = [vectors.splat(emit.load(four_at, INT32)) for four_at in fours_at]
                for number, halves in enumerate(columns, row * len(columns)):
                    for half, four in zip(halves, fours, strict=True):
                        sums[number] = vectors.multiply(sums[number], half, four)
            if levels and not knows_vnni() and octet == num_octets // 2 - 1:
                totals = [vectors.widened(number, total) for number, total in zip(sums, totals, strict=True)]
                sums = [None] * len(totals)
        return [vectors.widened(number, total) for number, total in zip(sums, totals, strict=True)]

    def _step_of_bytes(
        self, inputs_at: list[Value], weights_at: list[Value], totals: list[Value], *, prefetches: bool
    ) -> list[Value]:
        """As `_step`, for weights of 8 bits. Without VNNI their halves are multiplied apart: products of whole bytes do
        not fit into 16 bits.
        """
        emit, vectors = self._emit, self.vectors
        prefetched_at = weights_at[:: LANES // vectors.lanes] if prefetches else []
        halves: list[list[Value | None]] = [[*totals]] if knows_vnni() else [[None] * len(totals), [None] * len(totals)]
        for four in range(_STEP // QUAD):
            columns_at = [emit.at(at, four * VECTOR_BYTES) for at in weights_at]
            columns = [(emit.load(at, vectors.ints, 4),) if knows_vnni() else vectors.nibbles(at) for at in columns_at]
            for at in prefetched_at:
                emit.prefetch(emit.at(emit.at(at, self._ahead), four * VECTOR_BYTES), to_l2=True)
            for row, at in enumerate(inputs_at):
                inputs = vectors.splat(emit.load(emit.at(at, QUAD * four), INT32))
                for number, column in enumerate(columns, row * len(columns)):
                    for sums, half in zip(halves, column, strict=True):
                        sums[number] = vectors.multiply(sums[number], half, inputs)
        return halves[0] if knows_vnni() else self._sum_of_halves(halves, totals)

    def _step_of_halves(
        self, inputs_at: list[Value], weights_at: list[Value], totals: list[Value], *, prefetches: bool
    ) -> list[Value]:
        """As `_step`, for levels of NF4 on CPUs without VNNI. A loop, because this is the largest part of the code."""
        emit, builder, vectors = self._emit, self._emit.builder, self.vectors
        prefetched_at = weights_at[:: LANES // vectors.lanes] if prefetches else []
        nothing = ir.Constant(vectors.pairs, [0] * 2 * vectors.lanes)
        with emit.loop(INT64(_STEP // (2 * QUAD)), [nothing] * (2 * len(totals))) as octets:
            b_offset = builder.mul(octets.index, INT64(VECTOR_BYTES))
            columns = [vectors.nibbles(emit.at(at, b_offset)) for at in weights_at]
            for at in prefetched_at:
                emit.prefetch(emit.at(emit.at(at, self._ahead), b_offset), to_l2=True)
            inputs = [emit.at(at, builder.mul(octets.index, INT64(2 * QUAD))) for at in inputs_at]
            fours = [[vectors.splat(emit.load(emit.at(at, QUAD * part), INT32)) for part in range(2)] for at in inputs]
            sums: list[Value | None] = [*octets.carried]
            for half, levels in enumerate(_NF4_HALVES):
                found = [[vectors.looked_up(levels, numbers) for numbers in column] for column in columns]
                pairs = [(column, of_row) for of_row in fours for column in found]
                for number, (column, of_row) in enumerate(pairs, half * len(totals)):
                    for weights, four in zip(column, of_row, strict=True):
                        sums[number] = vectors.multiply(sums[number], weights, four)
            octets.next = [*filter(None, sums)]
        return self._sum_of_halves([[*octets.next[: len(totals)]], [*octets.next[len(totals) :]]], totals)

    def _sum_of_halves(self, halves: list[list[Value | None]], totals: list[Value]) -> list[Value]:
        """totals and the sums of products with the low bits of weights, and with their high ones."""
        low = [self.vectors.widened(number, total) for number, total in zip(halves[0], totals, strict=True)]
        return [self.vectors.widened(number, total, 16) for number, total in zip(halves[1], low, strict=True)]

    def _store(self, rows: range, columns: list[_Column], totals: list[Value]) -> None:
        emit, builder = self._emit, self._emit.builder
        places = [(row, column) for row in rows for column in columns]
        for total, (row, (panel, part)) in zip(totals, places, strict=True):
            offset = INT64((panel * LANES + part * self.vectors.lanes) * FLOAT_BYTES)
            emit.store(total, emit.at(self._out[0], builder.add(builder.mul(self._out[1], INT64(row)), offset)))
