"""Measures the highest arithmetic speed of this CPU: its own multiply-add instructions, with operands in registers.

A CPU without instructions for bf16 has the speed of fp32, because its numbers are widened. ONEDNN_MAX_CPU_ISA limits
these instructions as it limits those of the engines.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types

from engine.kernels.cpu.compilation.emitter import (
    INT8,
    INT32,
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
    emitted,
)
from engine.kernels.cpu.machine import amx_shapes, has_amx, knows_avx512, knows_bf16, knows_vnni, why_no_loops
from engine.kernels.cpu.products.amx import configure_amx, release_amx
from mesh.domain.errors import ConfigurationError

ARITHMETICS = ("float32", "bfloat16", "int8")
_TRY_S, _TRIES = 0.1, 5
_ONES = 0x3F803F80
"""The operands' bits: about 1 as fp32, two times 1 as bf16."""
_NUM_TILES = 4  # of AMX that hold sums; four more hold operands
_TILE_PRODUCTS = 16 * 16 * 16  # of 32 bits each


class _Instruction(NamedTuple):
    """The text for an assembler: $0 are the sums, $1 is free, $3 and $4 are the operands. `products`: of 32 bits."""

    text: str
    products: int


class Loop(NamedTuple):
    """`run(passes)` computes `operations` multiplications and additions in each pass, without the interpreter lock."""

    run: Callable[[int], object]
    operations: int


def operations_per_s(arithmetic: str, num_threads: int) -> float:
    """Multiplications and additions per second of so many threads in one of ARITHMETICS: the best of several tries.
    Raises ConfigurationError if the CPU lacks instructions that the kernels use.
    """
    loop = _loops()[arithmetic]
    passes = _passes_of(loop)
    begin = threading.Barrier(num_threads)
    with ThreadPoolExecutor(num_threads) as threads:
        try:
            tries_s = [
                max(threads.map(lambda _: _seconds(loop, passes, begin), range(num_threads))) for _ in range(_TRIES)
            ]
        finally:  # a signal takes back what no thread has begun: the others would wait for it for ever
            begin.abort()
    return loop.operations * passes * num_threads / min(tries_s)


@lru_cache(maxsize=1)
def _loops() -> Mapping[str, Loop]:
    if (reason := why_no_loops()) is not None:
        raise ConfigurationError(f"the limits of this CPU cannot be measured: {reason}")
    floats = _vector_loop(_Instruction("vfmadd231ps $4, $3, $0", 1))
    if has_amx():
        return {"float32": floats, "bfloat16": _tile_loop("tdpbf16ps", 2), "int8": _tile_loop("tdpbusd", 4)}
    halves = _vector_loop(_Instruction("vdpbf16ps $4, $3, $0", 2)) if knows_bf16() else floats
    if knows_vnni():
        prefix = "" if knows_avx512() else "{vex} "
        bytes_ = _Instruction(f"{prefix}vpdpbusd $4, $3, $0", 4)
    else:  # with a vector of ones in place of the second operand of vpmaddwd, as long as speed alone counts
        bytes_ = _Instruction("vpmaddubsw $4, $3, $1; vpmaddwd $4, $1, $1; vpaddd $1, $0, $0", 4)
    return {"float32": floats, "bfloat16": halves, "int8": _vector_loop(bytes_)}


def _vector_loop(instruction: _Instruction) -> Loop:
    """Adds to as many sums as there are registers: adding to one alone would wait for the previous addition."""
    lanes, num_sums = (16, 24) if knows_avx512() else (8, 12)
    vector = ir.VectorType(INT32, lanes)
    results = ir.LiteralStructType([vector, vector])
    assembled = ir.FunctionType(results, [vector] * 3)

    @emitted
    def compute(typing: TypingContext, passes: NumbaType, bits: NumbaType) -> Intrinsic:
        def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
            emit = Emitter(context, builder)
            operand = builder.insert_element(ir.Constant(vector, ir.Undefined), args[1], INT32(0))
            operand = builder.shuffle_vector(operand, operand, ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes))
            with emit.loop(args[0], [ir.Constant(vector, [0] * lanes)] * num_sums) as loop:
                for carried in loop.carried:
                    operands = [carried, operand, operand]
                    both = builder.asm(assembled, instruction.text, "=v,=&v,0,v,v", operands, False)
                    loop.next.append(builder.extract_value(both, 0))
            total = loop.next[0]
            for other in loop.next[1:]:
                total = builder.add(total, other)
            return builder.extract_element(total, INT32(0))

        return types.int32(types.int64, types.int32), generate

    @numba.njit(nogil=True)
    def run(passes: int, bits: Any) -> Any:
        return compute(passes, bits)

    return Loop(lambda passes: run(passes, numba.int32(_ONES)), 2 * lanes * instruction.products * num_sums)


def _tile_loop(multiply: str, products: int) -> Loop:
    """AMX's tiles, which `tilezero` fills: they compute as fast with zeros."""

    @emitted
    def compute(typing: TypingContext, passes: NumbaType) -> Intrinsic:
        def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
            emit = Emitter(context, builder)
            for tile in range(2 * _NUM_TILES):
                emit.call("llvm.x86.tilezero", VOID, INT8(tile))
            with emit.loop(args[0], []):
                for tile in range(_NUM_TILES):
                    emit.call(f"llvm.x86.{multiply}", VOID, INT8(tile), INT8(4 + tile // 2), INT8(6 + tile % 2))
            return context.get_dummy_value()

        return types.void(types.int64), generate

    @numba.njit(nogil=True)
    def run(passes: int, shapes: Any) -> None:
        configure_amx(shapes)
        compute(passes)
        release_amx()

    shapes = amx_shapes()
    return Loop(lambda passes: run(passes, shapes), 2 * _TILE_PRODUCTS * products * _NUM_TILES)


def _passes_of(loop: Loop) -> int:
    """Passes that take about _TRY_S."""
    loop.run(1)  # compiles it
    passes = 1000
    while (taken_s := _seconds(loop, passes)) < _TRY_S / 10:
        passes *= 4
    return round(passes * _TRY_S / taken_s)


def _seconds(loop: Loop, passes: int, begin: threading.Barrier | None = None) -> float:
    if begin is not None:
        begin.wait()
    started_s = time.perf_counter()
    loop.run(passes)
    return time.perf_counter() - started_s
