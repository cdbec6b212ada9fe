"""Words for writing LLVM code: pointers from arrays, vectors of 16 lanes, counted loops."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from engine.cpu.features import knows_bf16

INT8, INT32, INT64, FLOAT, HALF = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.HalfType()
_declare: Any = cgutils.get_or_insert_function
VOID, BYTE_POINTER = ir.VoidType(), INT8.as_pointer()
LANES = 16
LOG2_E = 1.4426950408889634
INTS, FLOATS, HALVES, SHORTS, BYTES = (
    ir.VectorType(kind, LANES) for kind in (INT32, FLOAT, HALF, ir.IntType(16), INT8)
)
# 2^x on [-0.5, 0.5], highest power first; float32 constants, exact in double.
_POWERS = tuple(
    float(np.float32(c))
    for c in (1.5353362e-4, 1.3398874e-3, 9.6184370e-3, 5.5503324e-2, 2.4022648e-1, 6.9314720e-1, 1.0)
)
_ZEROS = ir.Constant(INTS, [0] * LANES)
ALL_LANES = ir.Constant(ir.IntType(LANES), -1)
_CURRENT_ROUNDING = 4


def constant(vector: Any, value: float) -> Any:
    """A vector with the same value in all lanes."""
    return ir.Constant(vector, [value] * LANES)


@dataclass(frozen=True, slots=True)
class Emitter:
    """Writes code at the builder's place."""

    context: Any
    builder: Any

    def place(self, places: Any, index: int) -> tuple[Any, Any]:
        """Byte pointer and step of one of several places: (address, step in bytes)."""
        place = self.builder.extract_value(places, index)
        return self.pointer(self.builder.extract_value(place, 0)), self.builder.extract_value(place, 1)

    def array(self, kind: Any, value: Any) -> Any:
        """Byte pointer of an array's first element."""
        data = self.context.make_array(kind)(self.context, self.builder, value).data
        return self.builder.bitcast(data, BYTE_POINTER)

    def pointer(self, address: Any) -> Any:
        """Byte pointer of an address."""
        return self.builder.inttoptr(address, BYTE_POINTER)

    def at(self, pointer: Any, offset: Any) -> Any:
        """A byte pointer moved on; `offset` in bytes, an int or a value."""
        return self.builder.gep(pointer, [INT64(offset) if isinstance(offset, int) else offset])

    def load(self, pointer: Any, kind: Any, align: int = 4) -> Any:
        """A value of `kind` from a byte pointer."""
        value = self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()))
        value.align = align
        return value

    def store(self, value: Any, pointer: Any, align: int = 4) -> None:
        """A value to a byte pointer."""
        self.builder.store(value, self.builder.bitcast(pointer, value.type.as_pointer())).align = align

    def load_if(self, condition: Any, pointer: Any) -> Any:
        """16 fp32 lanes, or zeros."""
        at = self.builder.bitcast(pointer, FLOATS.as_pointer())
        return self.call(
            "llvm.masked.load.v16f32.p0", FLOATS, at, INT32(4), self._mask(condition), constant(FLOATS, 0.0)
        )

    def store_if(self, condition: Any, value: Any, pointer: Any) -> None:
        """16 fp32 lanes to a byte pointer, or nothing."""
        at = self.builder.bitcast(pointer, FLOATS.as_pointer())
        self.call("llvm.masked.store.v16f32.p0", VOID, value, at, INT32(4), self._mask(condition))

    def _mask(self, condition: Any) -> Any:
        bits = self.builder.sext(condition, ir.IntType(LANES))
        return self.builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))

    def floats(self, pointer: Any, element: Any) -> Any:
        """16 fp32 lanes from a byte pointer to fp32, or to fp16 kept in arrays of uint16."""
        if element.bitwidth == 16:
            return self.builder.fpext(self.load(pointer, HALVES, 2), FLOATS)
        return self.load(pointer, FLOATS)

    def splat(self, scalar: Any) -> Any:
        """16 lanes of one value."""
        vector = ir.VectorType(scalar.type, LANES)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, INT32(0))
        return self.builder.shuffle_vector(first, undefined, _ZEROS)

    def call(self, name: str, result: Any, *values: Any) -> Any:
        """An intrinsic of LLVM; sums may be reordered, and no fp32 vector holds NaNs."""
        kind = ir.FunctionType(result, [value.type for value in values])
        function = _declare(self.builder.module, kind, name)
        return self.builder.call(function, values, fastmath=("reassoc", "nnan") if result in (FLOAT, FLOATS) else ())

    def multiply_add(self, x: Any, y: Any, total: Any) -> Any:
        """x * y + total of fp32 vectors."""
        return self.call("llvm.fma.v16f32", FLOATS, x, y, total)

    def rounded(self, x: Any) -> Any:
        """The nearest integers of an fp32 vector, to even."""
        convert = "llvm.x86.avx512.mask.cvtps2dq.512"
        return self.call(convert, INTS, x, constant(INTS, 0), ALL_LANES, INT32(_CURRENT_ROUNDING))

    def bf16(self, x: Any) -> Any:
        """An fp32 vector as bf16, rounded to nearest, ties to even: the bits of 16 numbers."""
        builder = self.builder
        if knows_bf16():
            kind = ir.FunctionType(SHORTS, [FLOATS])
            return builder.asm(kind, "vcvtneps2bf16 $1, $0", "=v,v", [x], False)
        bits = builder.bitcast(x, INTS)
        odd = builder.and_(builder.lshr(bits, constant(INTS, 16)), constant(INTS, 1))
        rounded = builder.add(builder.add(bits, constant(INTS, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(rounded, constant(INTS, 16)), SHORTS)

    def smaller(self, x: Any, y: Any) -> Any:
        """The smaller of two integers."""
        return self.builder.select(self.builder.icmp_signed("<", x, y), x, y)

    def power_of_two(self, x: Any) -> Any:
        """2^x of a vector, for x up to 127; below -125 it stays, as smaller numbers would be slow.

        A polynomial gives the part in [-0.5, 0.5], and the whole part is added to the exponent.
        """
        x = self.call("llvm.maxnum.v16f32", FLOATS, x, constant(FLOATS, -125.0))
        whole = self.call("llvm.rint.v16f32", FLOATS, x)
        rest = self.builder.fsub(x, whole)
        power = constant(FLOATS, _POWERS[0])
        for coefficient in _POWERS[1:]:
            power = self.multiply_add(power, rest, constant(FLOATS, coefficient))
        scale = "llvm.x86.avx512.mask.scalef.ps.512"
        return self.call(scale, FLOATS, power, whole, power, ALL_LANES, INT32(_CURRENT_ROUNDING))

    @contextmanager
    def loop(self, count: Any, carried: list[Any]) -> Iterator["Loop"]:
        """A loop that runs at least once; set `next` to the carried values' successors, read `result` afterwards."""
        builder = self.builder
        before = builder.block
        body, after = builder.append_basic_block("body"), builder.append_basic_block("after")
        builder.branch(body)
        builder.position_at_end(body)
        index = builder.phi(INT64)
        index.add_incoming(INT64(0), before)
        phis = []
        for value in carried:
            phis.append(builder.phi(value.type))
            phis[-1].add_incoming(value, before)
        loop = Loop(index, phis, [])
        yield loop
        following = builder.add(index, INT64(1))
        index.add_incoming(following, builder.block)
        for phi, value in zip(phis, loop.next, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), body, after)
        builder.position_at_end(after)


@dataclass(slots=True)
class Loop:
    """Inside `Emitter.loop`."""

    index: Any
    carried: list[Any]
    next: list[Any]
