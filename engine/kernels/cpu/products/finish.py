"""The epilogue of a product, for a tile of sums with two vectors of 16 columns: scales and bias are applied, then the
results are stored, added or gated.

The mode is a compile-time constant. STORE writes the results, ADD adds them to what is there. GATE reads the first
vector as gates and the second as the values, and stores one vector, silu(gate) * up. Bounds are not checked.
"""

from typing import NamedTuple

from llvmlite import ir
from numba import types

from engine.kernels.cpu.arguments import Address
from engine.kernels.cpu.compilation.emitter import (
    FLOAT,
    FLOATS,
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
    gated_silu,
)
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES, VECTOR_BYTES, knows_avx512, knows_vnni

STORE, ADD, GATE = range(3)
FINISH_ROWS = 4
"""Rows that are finished side by side. Sums and factors of this many rows are read, even past the last row."""


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
            _store_if(emit, exists, gated_silu(emit, low, high), out)
            return
        adds = self._mode == ADD
        _store_if(emit, exists, low, out, adds=adds)
        both_exist = builder.and_(exists, self._has_both_panels)
        _store_if(emit, both_exist, high, emit.at(out, VECTOR_BYTES), adds=adds)

    def _scaled(self, sums: Value, factor: Value, panel: int) -> Value:
        """(sum - offset) * scale * factor + bias."""
        emit, builder = self._emit, self._emit.builder
        offsets, scales, biases = self._columns[panel]
        total = emit.load(sums, INTS if self._is_int8 else FLOATS)
        if self._is_int8:
            total = builder.sitofp(builder.sub(total, offsets) if knows_vnni() else total, FLOATS)
        return emit.multiply_add(total, builder.fmul(scales, factor), biases)


def _store_if(emit: Emitter, condition: Value, value: Value, pointer: Value, *, adds: bool = False) -> None:
    """Store 16 fp32 lanes at a byte pointer, or add them to what is there, if the condition holds."""
    builder = emit.builder
    if not knows_avx512():  # masked stores of AVX2 take tens of cycles on AMD's cores
        with builder.if_then(condition):
            emit.store(builder.fadd(emit.load(pointer, FLOATS), value) if adds else value, pointer)
        return
    lanes = builder.bitcast(builder.sext(condition, ir.IntType(LANES)), ir.VectorType(ir.IntType(1), LANES))
    at = builder.bitcast(pointer, FLOATS.as_pointer())
    if adds:
        there = emit.call("llvm.masked.load.v16f32.p0", FLOATS, at, INT32(4), lanes, constant(FLOATS, 0.0))
        value = builder.fadd(there, value)
    emit.call("llvm.masked.store.v16f32.p0", VOID, value, at, INT32(4), lanes)


@emitted
def finish_rows(typing: TypingContext, tile: NumbaType, mode: NumbaType, element: NumbaType) -> Intrinsic:
    """Finish all rows of a SumTile. `mode` is a compile-time constant, `element` any element of the weights."""
    is_int8 = element in (types.int8, types.int64)

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        finish = Finish(Emitter(context, builder), args[0], mode.literal_value, is_int8=is_int8)
        finish.remaining(INT64(0))
        return context.get_dummy_value()

    return types.void(tile, mode, element), generate
