"""Vectors of weights of 4 and 8 bits, and their products with bytes: the operations of nibbles.py."""

from collections.abc import Sequence

from llvmlite import ir

from engine.kernels.cpu.compilation.emitter import FLOAT, HALF, INT8, INT32, Emitter, Value
from engine.kernels.cpu.machine import LANES, MAX_ZERO, QUAD, knows_avx512, knows_vnni


class Vectors:
    """Writes operations on vectors of one register: 16 lanes with AVX-512, else 8."""

    def __init__(self, emit: Emitter) -> None:
        self.emit, self.lanes = emit, LANES if knows_avx512() else LANES // 2
        self.ints, self.floats, self._halves, self._octets = (
            ir.VectorType(kind, self.lanes) for kind in (INT32, FLOAT, HALF, INT8)
        )
        self.pairs = ir.VectorType(ir.IntType(16), 2 * self.lanes)
        self.bytes = ir.VectorType(INT8, QUAD * self.lanes)
        self.nothing = ir.Constant(self.floats, [0.0] * self.lanes)

    def splat(self, scalar: Value) -> Value:
        vector = ir.VectorType(scalar.type, self.lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.emit.builder.insert_element(undefined, scalar, INT32(0))
        return self.emit.builder.shuffle_vector(first, undefined, ir.Constant(self.ints, [0] * self.lanes))

    def nibbles(self, at: Value) -> tuple[Value, Value]:
        """The low halves of the bytes at an address, and the high ones, as bytes: of 4 bits, the weights of 8 inputs, 4
        of them in each lane.
        """
        builder, mask = self.emit.builder, ir.Constant(self.bytes, [15] * QUAD * self.lanes)
        packed = self.emit.load(at, self.ints, 4)
        high = builder.lshr(packed, ir.Constant(self.ints, [4] * self.lanes))
        low, high = (builder.and_(builder.bitcast(bits, self.bytes), mask) for bits in (packed, high))
        return low, high

    def looked_up(self, levels: Sequence[int], numbers: Value) -> Value:
        """The bytes of `levels`, of which there are 16, with these numbers."""
        table = ir.Constant(self.bytes, list(levels) * (QUAD * self.lanes // len(levels)))
        name = "llvm.x86.avx512.pshuf.b.512" if knows_avx512() else "llvm.x86.avx2.pshuf.b"
        return self.emit.call(name, self.bytes, table, numbers)

    def scales(self, at: Value) -> Value:
        return self.emit.builder.fpext(self.emit.load(at, self._halves, 2), self.floats)

    def zeros(self, at: Value) -> Value:
        return self.emit.builder.zext(self.emit.load(at, self._octets, 1), self.ints)

    def rises(self, zeros: Value) -> Value:
        """MAX_ZERO minus these zeros, for each of the bytes of `nibbles`: weights of 4 bits are raised by it."""
        lanes, size = self.emit.builder.bitcast(zeros, self.bytes), QUAD * self.lanes
        places = ir.Constant(ir.VectorType(INT32, size), [byte // QUAD * QUAD for byte in range(size)])
        repeated = self.emit.builder.shuffle_vector(lanes, ir.Constant(self.bytes, ir.Undefined), places)
        return self.emit.builder.sub(ir.Constant(self.bytes, [MAX_ZERO] * size), repeated)

    def dot_pairs(self, left: Value, right: Value) -> Value:
        """The sum of the products of each lane's two int16."""
        name = "llvm.x86.avx512.pmaddw.d.512" if knows_avx512() else "llvm.x86.avx2.pmadd.wd"
        left, right = (self.emit.builder.bitcast(lanes, self.pairs) for lanes in (left, right))
        return self.emit.call(name, self.ints, left, right)

    def multiply(self, total: Value | None, weights: Value, activations: Value) -> Value:
        """total + the products of 4 bytes in each lane: int32 with VNNI, else int16, two in a lane."""
        builder = self.emit.builder
        if knows_vnni():
            name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
            return self.emit.call(name, self.ints, total, builder.bitcast(weights, self.ints), activations)
        name = "llvm.x86.avx512.pmaddubs.w.512" if knows_avx512() else "llvm.x86.avx2.pmadd.ub.sw"
        products = self.emit.call(name, self.pairs, weights, builder.bitcast(activations, self.bytes))
        return products if total is None else builder.add(total, products)

    def widened(self, sums: Value, total: Value, factor: int = 1) -> Value:
        """`sums` of `multiply`: with `total` in them if they are int32; else, in int16, total + factor * sums."""
        if knows_vnni():
            return sums
        factors = ir.Constant(self.pairs, [factor] * 2 * self.lanes)
        return self.emit.builder.add(total, self.dot_pairs(sums, factors))

    def add_scaled(self, exact: Value, factor: Value, scale: Value, total: Value) -> Value:
        """total + exact * factor * scale, never reordered."""
        value = self.emit.builder.sitofp(exact, self.floats)
        value = self.emit.builder.fmul(value, factor, flags=("nsz",))
        return self.emit.call(f"llvm.fma.v{self.lanes}f32", self.floats, value, scale, total)
