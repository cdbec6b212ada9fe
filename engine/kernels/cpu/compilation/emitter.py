"""Helpers for intrinsics: Python functions that write the LLVM code of one operation.

numba calls an intrinsic with the types of the arguments; it returns the signature and `generate`, which gets the
arguments' LLVM values and writes the code with an `Emitter`: byte pointers, vectors of 16 lanes, counted loops.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.cpu.machine import (
    LANES,
    LOG2_E,
    VECTOR_BYTES,
    knows_avx512,
    knows_bf16,
)

T = TypeVar("T", bound=Hashable)
Value: TypeAlias = ir.Value
Values: TypeAlias = Sequence[ir.Value]
LLVMType: TypeAlias = ir.Type
Builder: TypeAlias = ir.IRBuilder
# numba does not annotate these classes, and which attributes a type has depends on the type (bitwidth, literal_value).
NumbaType: TypeAlias = Any
TypingContext: TypeAlias = Any
CodeContext: TypeAlias = Any
Signature: TypeAlias = Any
Intrinsic: TypeAlias = tuple[Signature, Callable[[CodeContext, Builder, Signature, Values], Value]]

_declare: Any = cgutils.get_or_insert_function
INT8, INT32, INT64, FLOAT, HALF = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.HalfType()
VOID, BYTE_POINTER = ir.VoidType(), INT8.as_pointer()
INTS, FLOATS, HALVES, SHORTS, BYTES = (
    ir.VectorType(kind, LANES) for kind in (INT32, FLOAT, HALF, ir.IntType(16), INT8)
)
_PAIRS = ir.VectorType(ir.IntType(16), 2 * LANES)
_BYTE_BITS = ir.Constant(_PAIRS, [8] * 2 * LANES)
# 2^x on [-0.5, 0.5], highest power first; float32 constants, exact in double.
_POWERS = tuple(
    float(np.float32(c))
    for c in (1.5353362e-4, 1.3398874e-3, 9.6184370e-3, 5.5503324e-2, 2.4022648e-1, 6.9314720e-1, 1.0)
)
TINY_BITS = 0x1E3CE508
"""The bits of TINY, 1e-20, the least magnitude that a row is scaled by: so a row of zeros has a scale."""
_ZEROS = ir.Constant(INTS, [0] * LANES)
_FP16_OF_FP8 = -0x4001
"""The bits of fp16 that a sign-extended byte of fp8 fills, shifted by 7: all but the highest of the exponent."""
ALL_LANES = ir.Constant(ir.IntType(LANES), -1)
_CURRENT_ROUNDING = 4
_MANTISSA_BITS = 23


def emitted(function: Callable[..., Intrinsic]) -> Callable[..., Any]:
    """Make an intrinsic callable from compiled code. Arguments that are literals arrive as literal types."""
    compiled: Callable[..., Any] = intrinsic(prefer_literal=True)(function)
    return compiled


def constant(vector: LLVMType, value: float) -> Value:
    """A vector with the same value in all lanes."""
    return ir.Constant(vector, [value] * LANES)


@dataclass(frozen=True, slots=True)
class Emitter:
    """Writes LLVM code at the builder's position."""

    context: CodeContext
    builder: Builder

    def members(self, value: Value, count: int) -> list[Value]:
        """The first `count` members of a tuple."""
        return [self.builder.extract_value(value, i) for i in range(count)]

    def matrix(self, matrix: Value) -> tuple[Value, Value]:
        """Byte pointer and step of an `arguments.Matrix`."""
        address, step = self.members(matrix, 2)
        return self.pointer(address), step

    def array(self, array_type: NumbaType, value: Value) -> Value:
        """Byte pointer of an array's first element."""
        data = self.context.make_array(array_type)(self.context, self.builder, value).data
        return self.builder.bitcast(data, BYTE_POINTER)

    def pointer(self, address: Value) -> Value:
        """Byte pointer of an address."""
        return self.builder.inttoptr(address, BYTE_POINTER)

    def at(self, pointer: Value, offset: Value | int) -> Value:
        """The byte pointer `offset` bytes further on."""
        return self.builder.gep(pointer, [INT64(offset) if isinstance(offset, int) else offset])

    def vector_at(self, pointer: Value, index: Value) -> Value:
        """The byte pointer `index` vectors further on."""
        return self.at(pointer, self.builder.mul(index, INT64(VECTOR_BYTES)))

    def load(self, pointer: Value, loaded_type: LLVMType, align: int = 4) -> Value:
        """Load a value of `loaded_type` from a byte pointer; `align` in bytes."""
        value = self.builder.load(self.builder.bitcast(pointer, loaded_type.as_pointer()))
        value.align = align
        return value

    def store(self, value: Value, pointer: Value, align: int = 4) -> None:
        """Store a value at a byte pointer; `align` in bytes."""
        self.builder.store(value, self.builder.bitcast(pointer, value.type.as_pointer())).align = align

    def floats(self, pointer: Value, element: NumbaType) -> Value:
        """Load 16 numbers of type `element` as fp32: fp32, uint16 that holds fp16, or bool that holds fp8, which is
        divided by FP8_FACTOR.
        """
        if element == types.boolean:
            # The exponent of e4m3 is that of fp16 but for its bias, so all numbers fit, denormal ones too.
            octets = self.builder.sext(self.load(pointer, BYTES, 1), SHORTS)
            halves = self.builder.and_(self.builder.shl(octets, constant(SHORTS, 7)), constant(SHORTS, _FP16_OF_FP8))
            return self.builder.fpext(self.builder.bitcast(halves, HALVES), FLOATS)
        if element == types.uint16:
            return self.builder.fpext(self.load(pointer, HALVES, 2), FLOATS)
        return self.load(pointer, FLOATS)

    def prefetch(self, pointer: Value, *, to_l2: bool = False) -> None:
        """Prefetch the cache line of a byte pointer, which may be invalid."""
        self.call("llvm.prefetch.p0", VOID, pointer, INT32(0), INT32(2 if to_l2 else 3), INT32(1))

    def splat(self, scalar: Value) -> Value:
        """A vector with the scalar in all 16 lanes."""
        vector = ir.VectorType(scalar.type, LANES)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, INT32(0))
        return self.builder.shuffle_vector(first, undefined, _ZEROS)

    def call(self, name: str, result: LLVMType, *values: Value) -> Value:
        """Call an LLVM intrinsic. Sums may be reordered, and fp32 values are assumed not to be NaN."""
        function_type = ir.FunctionType(result, [value.type for value in values])
        function = _declare(self.builder.module, function_type, name)
        return self.builder.call(function, values, fastmath=("reassoc", "nnan") if result in (FLOAT, FLOATS) else ())

    def add_in_order(self, total: Value, x: Value) -> Value:
        """total + x of fp32 vectors, never reordered. Without flags, numba would allow reordering."""
        return self.builder.fadd(total, x, flags=("nsz",))

    def product(self, x: Value, y: Value) -> Value:
        """x * y of fp32 vectors, rounded for itself."""
        return self.builder.fmul(x, y, flags=("nsz",))

    def multiply_add(self, x: Value, y: Value, total: Value) -> Value:
        """x * y + total of fp32 vectors."""
        return self.call("llvm.fma.v16f32", FLOATS, x, y, total)

    def rounded(self, x: Value) -> Value:
        """Round an fp32 vector to int32, ties to even."""
        if not knows_avx512():
            return self._in_halves("llvm.x86.avx.cvt.ps2dq.256", INT32, x)
        convert = "llvm.x86.avx512.mask.cvtps2dq.512"
        return self.call(convert, INTS, x, constant(INTS, 0), ALL_LANES, INT32(_CURRENT_ROUNDING))

    def bf16(self, x: Value) -> Value:
        """Round an fp32 vector to bf16, ties to even; returns the bits of the 16 numbers."""
        builder = self.builder
        if knows_bf16():
            function_type = ir.FunctionType(SHORTS, [FLOATS])
            return builder.asm(function_type, "vcvtneps2bf16 $1, $0", "=v,v", [x], False)
        bits = builder.bitcast(x, INTS)
        odd = builder.and_(builder.lshr(bits, constant(INTS, 16)), constant(INTS, 1))
        rounded = builder.add(builder.add(bits, constant(INTS, 0x7FFF)), odd)
        return builder.trunc(builder.lshr(rounded, constant(INTS, 16)), SHORTS)

    def smaller(self, x: Value, y: Value) -> Value:
        """The smaller of two signed integers."""
        return self.builder.select(self.builder.icmp_signed("<", x, y), x, y)

    def power_of_two(self, x: Value) -> Value:
        """2^x of a vector, for x <= 127. x is raised to -125 first, because denormal results would be slow.

        A polynomial computes the power of the fraction in [-0.5, 0.5]; the integer is added to the exponent.
        """
        x = self.call("llvm.maxnum.v16f32", FLOATS, x, constant(FLOATS, -125.0))
        integer = self.call("llvm.rint.v16f32", FLOATS, x)
        fraction = self.builder.fsub(x, integer)
        power = constant(FLOATS, _POWERS[0])
        for coefficient in _POWERS[1:]:
            power = self.multiply_add(power, fraction, constant(FLOATS, coefficient))
        if not knows_avx512():
            exponent = self.builder.shl(self.builder.fptosi(integer, INTS), constant(INTS, _MANTISSA_BITS))
            return self.builder.bitcast(self.builder.add(self.builder.bitcast(power, INTS), exponent), FLOATS)
        scale = "llvm.x86.avx512.mask.scalef.ps.512"
        return self.call(scale, FLOATS, power, integer, power, ALL_LANES, INT32(_CURRENT_ROUNDING))

    def reciprocal(self, x: Value) -> Value:
        """1 / x of a vector of normal numbers. One Newton step makes AVX-512's estimate as exact as a division."""
        if not knows_avx512():
            return self.builder.fdiv(constant(FLOATS, 1.0), x)
        estimate = self.call("llvm.x86.avx512.rcp14.ps.512", FLOATS, x, constant(FLOATS, 0.0), ALL_LANES)
        correction = self.multiply_add(self.builder.fneg(x), estimate, constant(FLOATS, 2.0))
        return self.builder.fmul(estimate, correction)

    def dot_bytes(self, totals: Value, unsigned: Value, signed: Value) -> Value:
        """Add the products of each lane's four bytes to the lane's total. The CPU must have VNNI."""
        if knows_avx512():
            return self.call("llvm.x86.avx512.vpdpbusd.512", INTS, totals, unsigned, signed)
        return self._in_halves("llvm.x86.avx512.vpdpbusd.256", INT32, totals, unsigned, signed)

    def even_bytes(self, lanes: Value) -> Value:
        """The signed bytes 0 and 2 of each lane, as two int16."""
        return self.odd_bytes(self.builder.shl(self.builder.bitcast(lanes, _PAIRS), _BYTE_BITS))

    def odd_bytes(self, lanes: Value) -> Value:
        """The signed bytes 1 and 3 of each lane, as two int16."""
        return self.builder.bitcast(self.builder.ashr(self.builder.bitcast(lanes, _PAIRS), _BYTE_BITS), INTS)

    def dot_bf16(self, totals: Value, left: Value, right: Value) -> Value:
        """Add the products of each lane's two bf16 numbers, which are read as one fp32, to the lane's fp32 total."""
        function_type = ir.FunctionType(FLOATS, [FLOATS] * 3)
        return self.builder.asm(function_type, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [totals, left, right], False)

    def dot_pairs(self, totals: Value, left: Value, right: Value) -> Value:
        """Add the products of each lane's two int16 to the lane's total."""
        left, right = (self.builder.bitcast(lanes, _PAIRS) for lanes in (left, right))
        if knows_avx512():
            sums = self.call("llvm.x86.avx512.pmaddw.d.512", INTS, left, right)
        else:
            sums = self._in_halves("llvm.x86.avx2.pmadd.wd", INT32, left, right)
        return self.builder.add(totals, sums)

    def registers(self, vector: Value) -> list[Value]:
        """A whole vector as the CPU holds it: the same with AVX-512, else its halves."""
        return [vector] if knows_avx512() else [self._part(vector, half) for half in range(2)]

    def joined(self, registers: list[Value]) -> Value:
        """The reverse of `registers`."""
        if len(registers) == 1:
            return registers[0]
        return self.builder.shuffle_vector(*registers, ir.Constant(INTS, list(range(LANES))))

    def _part(self, vector: Value, half: int) -> Value:
        count = vector.type.count // 2
        mask = ir.Constant(ir.VectorType(INT32, count), list(range(half * count, (half + 1) * count)))
        return self.builder.shuffle_vector(vector, vector, mask)

    def _in_halves(self, name: str, element: LLVMType, *values: Value) -> Value:
        """Call an intrinsic of AVX2 for both halves of vectors; returns a vector of 16 elements."""
        half_type = ir.VectorType(element, LANES // 2)
        return self.joined([self.call(name, half_type, *(self._part(value, i) for value in values)) for i in range(2)])

    def align_stack(self) -> None:
        """Align the stack frame of the function, and of any function it is inlined into, to whole vectors.

        LLVM aligns a frame for a variable that asks for it, but not for registers that it spills. Without this, spilled
        vectors cross cache lines or not by chance, with the address of the thread's stack.
        """
        with self.builder.goto_entry_block():
            slot = self.builder.alloca(INT8)
            slot.align = VECTOR_BYTES
        self.builder.asm(ir.FunctionType(VOID, [BYTE_POINTER]), "", "r", [slot], True)

    def choose(self, number: Value, cases: Sequence[T], write: Callable[[T], None]) -> None:
        """Write code for each case, of which that with this number runs, or the last one. Equal cases share theirs."""
        blocks = {case: self.builder.append_basic_block("case") for case in dict.fromkeys(cases)}
        switch, end = self.builder.switch(number, blocks[cases[-1]]), self.builder.append_basic_block("chosen")
        for i, case in enumerate(cases[:-1]):
            switch.add_case(INT64(i), blocks[case])
        for case, block in blocks.items():
            self.builder.position_at_end(block)
            write(case)
            self.builder.branch(end)
        self.builder.position_at_end(end)

    @contextmanager
    def loop(self, count: Value, carried: list[Value]) -> Iterator["Loop"]:
        """A loop of `count` passes, at least one. The body appends the next values of `carried` to `loop.next`, which
        holds the last pass's values after the loop.
        """
        builder = self.builder
        self.align_stack()
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
    """The state of an `Emitter.loop`: the pass's index, and values carried from pass to pass."""

    index: Value
    carried: list[Value]
    next: list[Value]


def largest_of(emit: Emitter, values: Value, num_vectors: Value) -> Value:
    """Write code for a row's largest magnitude, at least TINY; NaN, which only its bits tell, if the row has one."""
    at = emit.pointer(values)
    with emit.loop(num_vectors, [constant(INTS, TINY_BITS)]) as loop:
        read = emit.load(emit.vector_at(at, loop.index), INTS)
        magnitudes = emit.builder.and_(read, constant(INTS, 0x7FFFFFFF))
        loop.next.append(emit.call("llvm.smax.v16i32", INTS, loop.carried[0], magnitudes))
    return emit.builder.bitcast(emit.call("llvm.vector.reduce.smax.v16i32", INT32, loop.next[0]), FLOAT)


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
