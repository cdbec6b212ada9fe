"""Weights of 4 bits that stand for weights of int8: `low + step * weight`, with a step and a low end for each group of
32 inputs of a column. They are unpacked before they are multiplied, so all else is as in int8: the rows of the left
operand, the exact sums over all inputs, and a scale for each column. (QServe, Lin et al. 2024, has two levels, too.)

A panel of 16 columns begins with 16 steps and 16 low ends for each group, in bytes. Then come the weights as
[inputs / 8][16][4] bytes: of 8 inputs, the low halves of a column's 4 bytes hold the first 4 and the high halves the
others, so one mask makes 4 inputs of a column in each lane, as in panels of int8 (`tiles.py`).
"""

from typing import NamedTuple

from llvmlite import ir
from numba import types

from engine.kernels.cpu.arguments import Address, Matrix
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.compilation.emitter import (
    BYTES,
    INT8,
    INT32,
    INT64,
    INTS,
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
from engine.kernels.cpu.machine import LANES, PANEL, QUAD, STEP_GROUP, VECTOR_BYTES

HEAD_BYTES = 2 * PANEL
"""Bytes of the steps and low ends of a panel's group."""
PASSES = STEP_GROUP // (2 * QUAD)
"""Passes of a group: each has 8 inputs of a panel, in one vector."""
_ALL_BYTES, _PAIRS = ir.VectorType(INT8, QUAD * LANES), ir.VectorType(ir.IntType(16), 2 * LANES)


def stepped_panel_bytes(depth: int) -> int:
    """Bytes of a panel of so many inputs, a multiple of STEP_GROUP."""
    return depth // STEP_GROUP * (HEAD_BYTES + PASSES * VECTOR_BYTES)


class Steps(NamedTuple):
    """The steps of a group's 16 columns, in both halves of each lane, and their low ends, in each of its bytes."""

    steps: Value
    lows: Value


def read_steps(emit: Emitter, at: Value) -> Steps:
    builder = emit.builder
    steps, lows = (builder.zext(emit.load(emit.at(at, offset), BYTES, 1), INTS) for offset in (0, PANEL))
    return Steps(
        _repeated(emit, builder.bitcast(steps, _PAIRS), 2), _repeated(emit, builder.bitcast(lows, _ALL_BYTES), QUAD)
    )


def unpacked(emit: Emitter, packed: Value, half: int, group: Steps) -> Value:
    """Weights in int8: 4 inputs of 16 columns, of the low halves (0) or the high ones (1) of a vector of weights."""
    builder = emit.builder
    bits = builder.lshr(packed, constant(INTS, 4)) if half else packed
    bits = builder.and_(bits, constant(INTS, 0x0F0F0F0F))
    # Two products fit side by side into 16 bits, because 15 * step < 2^8.
    scaled = builder.mul(builder.bitcast(bits, _PAIRS), group.steps)
    return builder.bitcast(builder.add(builder.bitcast(scaled, _ALL_BYTES), group.lows), INTS)


def _repeated(emit: Emitter, numbers: Value, count: int) -> Value:
    """The first of every `count` numbers, `count` times."""
    places = [number // count * count for number in range(numbers.type.count)]
    undefined, mask = ir.Constant(numbers.type, ir.Undefined), ir.VectorType(INT32, len(places))
    return emit.builder.shuffle_vector(numbers, undefined, ir.Constant(mask, places))


@jit
def unpack_unit(packed: Address, unit_bytes: int, out: Address) -> Matrix:
    """Write both panels of a unit at the address `out`, as a unit of int8, which is returned."""
    packed_panel = unit_bytes // 2
    depth = packed_panel // (HEAD_BYTES + PASSES * VECTOR_BYTES) * STEP_GROUP
    unpack_panel(packed, depth, out)
    unpack_panel(packed + packed_panel, depth, out + depth * PANEL)
    return Matrix(out, depth * PANEL)


@emitted
def unpack_panel(typing: TypingContext, packed: NumbaType, depth: NumbaType, out: NumbaType) -> Intrinsic:
    """Write a panel as one of int8, [depth / 4][16][4], at the address `out`."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        packed_at, depth, out_at = emit.pointer(args[0]), args[1], emit.pointer(args[2])
        num_groups = builder.udiv(depth, INT64(STEP_GROUP))
        weights_at = emit.at(packed_at, builder.mul(num_groups, INT64(HEAD_BYTES)))
        with emit.loop(num_groups, []) as groups:
            group = read_steps(emit, emit.at(packed_at, builder.mul(groups.index, INT64(HEAD_BYTES))))
            first = builder.mul(groups.index, INT64(PASSES))
            for number in range(PASSES):
                at = builder.mul(builder.add(first, INT64(number)), INT64(VECTOR_BYTES))
                bits, target = emit.load(emit.at(weights_at, at), INTS), emit.at(out_at, builder.shl(at, INT64(1)))
                for half in range(2):
                    emit.store(unpacked(emit, bits, half, group), emit.at(target, half * VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate
