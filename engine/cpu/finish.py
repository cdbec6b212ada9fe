"""What follows a matrix product, on a tile of its sums: scales and bias, then store, add to what is there, or gate.

A tile has two vectors of 16 columns. How its sums end is a compile-time constant: STORE, ADD, or GATE, where the first
vector is gates, the second what they gate, and the result silu(gate) * up is one vector.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.cpu.ir import ALL_LANES, FLOAT, FLOATS, INT64, INTS, LOG2_E, Emitter, constant

STORE, ADD, GATE = range(3)
ROWS = 4
"""Rows that are ended side by side; factors and sums of so many are read."""
_VECTOR_BYTES = 64
_FLOAT_BYTES = 4
_emit: Callable[[Callable[..., Any]], Any] = intrinsic(prefer_literal=True)


class Finish:
    """Ends rows of a tile of sums, which lie one row behind the other.

    `tile`: (of rows: addresses of the sums, of the rows' factors, of the first row's place, bytes from place to place,
    how many), (of columns: addresses of offsets, scales and biases), vectors that count. Offsets are what the zero
    point of `a` added to int32 sums.
    """

    def __init__(self, emit: Emitter, tile: Any, how: int, *, is_int8: bool) -> None:
        builder = emit.builder
        self._emit, self._how, self._is_int8 = emit, how, is_int8
        of_rows, of_columns = (builder.extract_value(tile, i) for i in range(2))
        self._sums, self._factors, self._out = (emit.pointer(builder.extract_value(of_rows, i)) for i in range(3))
        self._out_step, self.num_rows = (builder.extract_value(of_rows, i) for i in (3, 4))
        self._is_whole = builder.icmp_signed(">", builder.extract_value(tile, 2), INT64(1))
        places = [emit.pointer(builder.extract_value(of_columns, i)) for i in range(3)]
        kinds = (INTS if is_int8 else FLOATS, FLOATS, FLOATS)
        self._columns = [
            [emit.load(emit.at(place, vector * _VECTOR_BYTES), kind) for place, kind in zip(places, kinds, strict=True)]
            for vector in range(2)
        ]

    def rows(self, first: Any) -> None:
        """Write code that ends those of the ROWS from `first` on that there are, without a branch."""
        for row in (self._emit.builder.add(first, INT64(i)) for i in range(ROWS)):
            self._row(row, self._emit.builder.icmp_signed("<", row, self.num_rows))

    def rest(self, first: Any) -> None:
        """Write code that ends all rows from `first` on."""
        builder = self._emit.builder
        left = builder.sub(self.num_rows, first)
        with builder.if_then(builder.icmp_signed(">", left, INT64(0)), likely=False):
            groups = builder.sdiv(builder.add(left, INT64(ROWS - 1)), INT64(ROWS))
            with self._emit.loop(groups, []) as loop:
                self.rows(builder.add(first, builder.mul(loop.index, INT64(ROWS))))

    def _row(self, row: Any, exists: Any) -> None:
        emit, builder = self._emit, self._emit.builder
        factor = emit.splat(emit.load(emit.at(self._factors, builder.mul(row, INT64(_FLOAT_BYTES))), FLOAT))
        sums = emit.at(self._sums, builder.mul(row, INT64(2 * _VECTOR_BYTES)))
        low, high = (self._finished(emit.at(sums, i * _VECTOR_BYTES), factor, i) for i in range(2))
        out = emit.at(self._out, builder.mul(row, self._out_step))
        if self._how == GATE:
            emit.store_if(exists, self._gated(low, high), out)
            return
        self._put(low, out, exists)
        self._put(high, emit.at(out, _VECTOR_BYTES), builder.and_(exists, self._is_whole))

    def _finished(self, sums: Any, factor: Any, vector: int) -> Any:
        """(sum - offset) * scale * factor + bias."""
        emit, builder = self._emit, self._emit.builder
        offsets, scales, biases = self._columns[vector]
        total = emit.load(sums, INTS if self._is_int8 else FLOATS)
        if self._is_int8:
            total = builder.sitofp(builder.sub(total, offsets), FLOATS)
        return emit.multiply_add(total, builder.fmul(scales, factor), biases)

    def _put(self, value: Any, out: Any, counts: Any) -> None:
        if self._how == ADD:
            value = self._emit.builder.fadd(self._emit.load_if(counts, out), value)
        self._emit.store_if(counts, value, out)

    def _gated(self, gate: Any, up: Any) -> Any:
        """silu(gate) * up. One step of Newton's makes the CPU's estimate of 1 / x as exact as a division."""
        emit, builder = self._emit, self._emit.builder
        exponent = builder.fmul(gate, constant(FLOATS, -LOG2_E))
        exponent = emit.call("llvm.minnum.v16f32", FLOATS, exponent, constant(FLOATS, 126.0))
        below = builder.fadd(emit.power_of_two(exponent), constant(FLOATS, 1.0))
        guess = emit.call("llvm.x86.avx512.rcp14.ps.512", FLOATS, below, constant(FLOATS, 0.0), ALL_LANES)
        error = emit.multiply_add(builder.fneg(below), guess, constant(FLOATS, 2.0))
        return builder.fmul(builder.fmul(gate, up), builder.fmul(guess, error))


@_emit
def finish_rows(typing: Any, tile: Any, how: Any, kind: Any) -> Any:
    """End all rows of a tile; see Finish. `kind` is any number of the sums' dtype."""
    is_int8 = kind != types.float32

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        finish = Finish(Emitter(context, builder), args[0], how.literal_value, is_int8=is_int8)
        finish.rest(INT64(0))
        return context.get_dummy_value()

    return types.void(tile, how, kind), generate
