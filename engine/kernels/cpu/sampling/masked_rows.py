"""Copies of rows of logits, in which tokens that a mask forbids are minus infinity."""

import math
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from engine.kernels.cpu.arguments import Int64s, Matrix, Range
from engine.kernels.cpu.compilation.emitter import (
    FLOATS,
    INT64,
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
from engine.kernels.cpu.compilation.stored import Addresses, Kernel, Kinds, load
from engine.kernels.cpu.machine import FLOAT_BYTES, LANES, VECTOR_BYTES
from engine.kernels.cpu.threads.barrier import share_of
from engine.kernels.cpu.vectors import address, read_float, scale_row, write_float

_LOWEST = np.float32(-math.inf)
_ONE = np.float32(1.0)


class MaskedRows(NamedTuple):
    """Rows of fp32 numbers, their copies, and the masks of some of them."""

    rows: Matrix
    copies: Matrix
    num_columns: int
    mask_of: Int64s  # [rows]: the number of its mask; -1: none
    masks: NDArray[np.uint8]  # [masks, bytes]: one bit for each column, the lowest first


@Kernel
def copy_rows(kinds: Kinds, addresses: Addresses, _: Range) -> None:
    """Copy the rows. Every thread runs this kernel, on MaskedRows, anything twice, and Team."""
    given, _, _, team = load(kinds, addresses)
    num_vectors = given.num_columns // LANES
    own = share_of(len(given.mask_of), team.thread, team.num_threads)
    for i in range(own.first, own.end):
        row, out = given.rows.address + i * given.rows.step, given.copies.address + i * given.copies.step
        number = given.mask_of[i]
        if num_vectors > 0:
            if number < 0:
                scale_row(row, num_vectors, _ONE, out)
            else:
                _copy_allowed(row, address(given.masks[number]), num_vectors, out)
        for column in range(num_vectors * LANES, given.num_columns):
            is_allowed = number < 0 or given.masks[number, column >> 3] >> (column & 7) & 1
            value = read_float(row + column * FLOAT_BYTES) if is_allowed else _LOWEST
            write_float(out + column * FLOAT_BYTES, value)


_INTP = types.intp
_BITS = ir.VectorType(ir.IntType(1), LANES)


@emitted
def _copy_allowed(
    typing: TypingContext, values: NumbaType, mask: NumbaType, num_vectors: NumbaType, out: NumbaType
) -> Intrinsic:
    """out = values where the mask has a one, else minus infinity."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        at, mask, out = (emit.pointer(args[i]) for i in (0, 1, 3))
        with emit.loop(args[2], []) as loop:
            offset = builder.mul(loop.index, INT64(VECTOR_BYTES))
            bits = emit.load(emit.at(mask, builder.mul(loop.index, INT64(LANES // 8))), ir.IntType(LANES), 1)
            value = emit.load(emit.at(at, offset), FLOATS)
            allowed = builder.select(builder.bitcast(bits, _BITS), value, constant(FLOATS, -math.inf))
            emit.store(allowed, emit.at(out, offset))
        return context.get_dummy_value()

    return types.void(*[_INTP] * 4), generate
