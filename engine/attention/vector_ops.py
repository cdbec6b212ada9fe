"""Three vector operations that numba's own loops do not reach: LLVM vectors over rows of flat fp32 arrays.

A place is a tuple of an array and an offset; offsets and steps count elements. `rows` and `width` are compile-time
constants, so that everything is unrolled and the shared row stays in registers. Nothing is checked: a wrong offset
reads or writes foreign memory. Code compiled to disk is keyed by `decode_kernel.py`: after a change here, save that
file too.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_MAX_LANES = 16
_CACHE_LINE_FLOATS = 16
_FAST = ("fast",)
_vector_op: Callable[[Callable[..., Any]], Any] = intrinsic(prefer_literal=True)
_declare: Any = cgutils.get_or_insert_function


def _num_lanes(width: int) -> int:
    """Widest vector that divides a row; LLVM splits it where the machine's registers are narrower."""
    lanes = _MAX_LANES
    while width % lanes:
        lanes //= 2
    return lanes


def _pointer(context: Any, builder: Any, kind: Any, place: Any) -> Any:
    """Address of a place: a tuple of an array and an offset."""
    array, offset = builder.extract_value(place, 0), builder.extract_value(place, 1)
    return builder.gep(context.make_array(kind[0])(context, builder, array).data, [offset])


def _load(builder: Any, vectors: Any, index: int) -> Any:
    value = builder.load(builder.gep(vectors, [_INT64(index)]))
    value.align = 4
    return value


def _multiply_add(builder: Any, x: Any, y: Any, total: Any) -> Any:
    return builder.fadd(total, builder.fmul(x, y, flags=_FAST), flags=_FAST)


@_vector_op
def dot_rows(typing: Any, many: Any, one: Any, out: Any, rows: Any, width: Any) -> Any:
    """out[i * step] = dot(row i of `many`, the row `one`), for i < rows; `out` is (array, offset, step)."""
    signature = types.void(many, one, out, rows, width)
    lanes = _num_lanes(width.literal_value)
    num_vectors = width.literal_value // lanes
    vector = ir.VectorType(_FLOAT, lanes)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers = [_pointer(context, builder, signature.args[i], args[i]) for i in range(3)]
        left, right = (builder.bitcast(pointer, vector.as_pointer()) for pointer in pointers[:2])
        target = pointers[2]
        reduce_type = ir.FunctionType(_FLOAT, [_FLOAT, vector])
        reduce = _declare(builder.module, reduce_type, f"llvm.vector.reduce.fadd.v{lanes}f32")
        shared = [_load(builder, right, i) for i in range(num_vectors)]
        for row in range(rows.literal_value):
            total = ir.Constant(vector, [0.0] * lanes)
            for i in range(num_vectors):
                total = _multiply_add(builder, _load(builder, left, row * num_vectors + i), shared[i], total)
            builder.store(builder.call(reduce, [_FLOAT(0.0), total], fastmath=_FAST), target)
            target = builder.gep(target, [builder.extract_value(args[2], 2)])
        return context.get_dummy_value()

    return signature, generate


@_vector_op
def add_scaled_rows(typing: Any, factors: Any, one: Any, out: Any, rows: Any, width: Any) -> Any:
    """Row i of `out` += factors[i * step] * the row `one`, for i < rows; `factors` is (array, offset, step)."""
    signature = types.void(factors, one, out, rows, width)
    lanes = _num_lanes(width.literal_value)
    num_vectors = width.literal_value // lanes
    vector = ir.VectorType(_FLOAT, lanes)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        factor_at, source, target = (_pointer(context, builder, signature.args[i], args[i]) for i in range(3))
        source, target = (builder.bitcast(pointer, vector.as_pointer()) for pointer in (source, target))
        undefined = ir.Constant(vector, ir.Undefined)
        zeros = ir.Constant(ir.VectorType(_INT32, lanes), [0] * lanes)
        shared = [_load(builder, source, i) for i in range(num_vectors)]
        for row in range(rows.literal_value):
            first = builder.insert_element(undefined, builder.load(factor_at), _INT32(0))
            factor = builder.shuffle_vector(first, undefined, zeros)
            factor_at = builder.gep(factor_at, [builder.extract_value(args[0], 2)])
            for i in range(num_vectors):
                index = row * num_vectors + i
                total = _multiply_add(builder, factor, shared[i], _load(builder, target, index))
                builder.store(total, builder.gep(target, [_INT64(index)])).align = 4
        return context.get_dummy_value()

    return signature, generate


@_vector_op
def prefetch_row(typing: Any, array: Any, at: Any, width: Any) -> Any:
    """Ask for `width` floats from offset `at` on to be brought near; harmless wherever that is."""
    signature = types.void(array, types.intp, width)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
        prefetch = _declare(builder.module, kind, "llvm.prefetch.p0")
        row = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
        for i in range(0, width.literal_value, _CACHE_LINE_FLOATS):
            line = builder.bitcast(builder.gep(row, [_INT64(i)]), byte)
            builder.call(prefetch, [line, _INT32(0), _INT32(3), _INT32(1)])
        return context.get_dummy_value()

    return signature, generate
