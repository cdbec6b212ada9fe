"""What follows a matrix product, on one row of its sums: scales and bias, then store, add or gate. Vectors of 16
columns.

`kind` is any number of the sums' dtype: int32 sums carry what the zero point of `a` added to them (`offsets`).
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.cpu.ir import FLOATS, INT64, INTS, LOG2_E, Emitter, constant

_VECTOR_BYTES = 64
_emit: Callable[[Callable[..., Any]], Any] = intrinsic(prefer_literal=True)


class _Columns:
    """A row's sums with what belongs to their columns; `found` and `columns` as in `finish`."""

    def __init__(self, emit: Emitter, found: Any, columns: Any, kind: Any) -> None:
        builder = emit.builder
        self._emit = emit
        self._sums, self.out = (emit.pointer(builder.extract_value(found, i)) for i in (0, 2))
        self._factor, self.num_vectors = emit.splat(builder.extract_value(found, 1)), builder.extract_value(found, 3)
        self._offsets, self._scales, self._biases = (emit.pointer(builder.extract_value(columns, i)) for i in range(3))
        self._is_int8 = kind != types.float32

    def finished(self, offset: Any) -> Any:
        """(sum - offset) * scale * factor + bias, of 16 columns at a byte offset."""
        emit, builder = self._emit, self._emit.builder
        total = emit.load(emit.at(self._sums, offset), INTS if self._is_int8 else FLOATS)
        if self._is_int8:
            total = builder.sitofp(builder.sub(total, emit.load(emit.at(self._offsets, offset), INTS)), FLOATS)
        scale = builder.fmul(emit.load(emit.at(self._scales, offset), FLOATS), self._factor)
        return emit.multiply_add(total, scale, emit.load(emit.at(self._biases, offset), FLOATS))


@_emit
def finish(typing: Any, found: Any, columns: Any, adds: Any, kind: Any) -> Any:
    """Write finished sums, or add them to what is there where the constant `adds` is 1.

    found: (address of the sums, the row's factor, where they go, vectors); columns: addresses of offsets, scales,
    biases.
    """
    is_added = bool(adds.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        row = _Columns(emit, args[0], args[1], kind)
        with emit.loop(row.num_vectors, []) as loop:
            offset = builder.mul(loop.index, INT64(_VECTOR_BYTES))
            value, target = row.finished(offset), emit.at(row.out, offset)
            emit.store(builder.fadd(emit.load(target, FLOATS), value) if is_added else value, target)
        return context.get_dummy_value()

    return types.void(found, columns, adds, kind), generate


@_emit
def finish_gated(typing: Any, found: Any, columns: Any, kind: Any) -> Any:
    """silu(gate) * up, for columns that are 16 gates and 16 ups by turns; vectors of the result, else as `finish`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        row = _Columns(emit, args[0], args[1], kind)
        with emit.loop(row.num_vectors, []) as loop:
            offset = builder.mul(loop.index, INT64(2 * _VECTOR_BYTES))
            gate, up = row.finished(offset), row.finished(builder.add(offset, INT64(_VECTOR_BYTES)))
            power = emit.power_of_two(builder.fmul(gate, constant(FLOATS, -LOG2_E)))
            sigmoid = builder.fdiv(constant(FLOATS, 1.0), builder.fadd(power, constant(FLOATS, 1.0)))
            value = builder.fmul(builder.fmul(gate, sigmoid), up)
            emit.store(value, emit.at(row.out, builder.mul(loop.index, INT64(_VECTOR_BYTES))))
        return context.get_dummy_value()

    return types.void(found, columns, kind), generate
