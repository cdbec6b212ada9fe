"""What follows a matrix product, on one row of its sums: scales and bias, then store, add or gate. Vectors of 16 columns.

All arguments are addresses but `factor`, counts and `kind`, which is any number of the sums' dtype: int32 sums carry what
the zero point of `a` added to them (`offsets`).
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.cpu.ir import FLOATS, INT64, INTS, Emitter, constant

_VECTOR_BYTES = 64
_INTP = types.intp
_LOG2_E = 1.4426950408889634
_emit: Callable[[Callable[..., Any]], Any] = intrinsic(prefer_literal=True)


class _Columns:
    """16 columns at a byte offset."""

    def __init__(self, emit: Emitter, args: Any, kind: Any) -> None:
        self._emit = emit
        self._sums, self._offsets, self._scales, self._biases = (emit.pointer(arg) for arg in args[:4])
        self._factor = emit.splat(args[4])
        self._is_int8 = kind != types.float32

    def finished(self, offset: Any) -> Any:
        """(sum - offset) * scale * factor + bias."""
        emit, builder = self._emit, self._emit.builder
        total = emit.load(emit.at(self._sums, offset), INTS if self._is_int8 else FLOATS)
        if self._is_int8:
            total = builder.sitofp(builder.sub(total, emit.load(emit.at(self._offsets, offset), INTS)), FLOATS)
        scale = builder.fmul(emit.load(emit.at(self._scales, offset), FLOATS), self._factor)
        return emit.multiply_add(total, scale, emit.load(emit.at(self._biases, offset), FLOATS))


@_emit
def finish(
    typing: Any, sums: Any, offsets: Any, scales: Any, biases: Any, factor: Any, out: Any, num_vectors: Any, adds: Any, kind: Any
) -> Any:
    """out = finished sums, or out += them where the constant `adds` is 1."""
    is_added = bool(adds.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        columns, out_at = _Columns(emit, args, kind), emit.pointer(args[5])
        with emit.loop(args[6], []) as loop:
            offset = builder.mul(loop.index, INT64(_VECTOR_BYTES))
            value, target = columns.finished(offset), emit.at(out_at, offset)
            emit.store(builder.fadd(emit.load(target, FLOATS), value) if is_added else value, target)
        return context.get_dummy_value()

    return types.void(*[_INTP] * 4, types.float32, _INTP, _INTP, adds, kind), generate


@_emit
def finish_gated(
    typing: Any, sums: Any, offsets: Any, scales: Any, biases: Any, factor: Any, out: Any, num_vectors: Any, kind: Any
) -> Any:
    """out = silu(gate) * up, for columns that are 16 gates and 16 ups by turns; `num_vectors` of `out`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        columns, out_at = _Columns(emit, args, kind), emit.pointer(args[5])
        with emit.loop(args[6], []) as loop:
            offset = builder.mul(loop.index, INT64(2 * _VECTOR_BYTES))
            gate = columns.finished(offset)
            up = columns.finished(builder.add(offset, INT64(_VECTOR_BYTES)))
            power = emit.power_of_two(builder.fmul(gate, constant(FLOATS, -_LOG2_E)))
            sigmoid = builder.fdiv(constant(FLOATS, 1.0), builder.fadd(power, constant(FLOATS, 1.0)))
            value = builder.fmul(builder.fmul(gate, sigmoid), up)
            emit.store(value, emit.at(out_at, builder.mul(loop.index, INT64(_VECTOR_BYTES))))
        return context.get_dummy_value()

    return types.void(*[_INTP] * 4, types.float32, _INTP, _INTP, kind), generate
