"""Matrix tiles in AMX's tile registers: 16 rows of 64 bytes each. Places are as in `tiles.py`.

AMX multiplies beside the vector units, not in them. So what follows a product, on vectors, is woven in between the
products of the next tile (`multiply_and_finish`), and costs almost nothing.

Registers: 0-3 sums, 4-5 rows of a, 6-7 panels of b. A thread calls `configure_amx` first. On a CPU without AMX, whose
compiler would not know it, nothing is done.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.cpu.features import knows_amx
from engine.cpu.finish import ROWS, Finish
from engine.cpu.ir import INT8, INT32, INT64, VOID, Emitter

_ROWS = 16
_ROW_BYTES = 64
_PANEL_BYTES = _ROWS * _ROW_BYTES
_CACHE_LINE_BYTES = 64
_emit: Callable[[Callable[..., Any]], Any] = intrinsic(prefer_literal=True)


class _Tile:
    """Writes the code of one tile: 16 * halves rows of a, two panels of b."""

    def __init__(self, emit: Emitter, places: Any, dot: str, halves: int) -> None:
        self._emit, self._dot, self._halves = emit, f"llvm.x86.{dot}", halves
        self._a, self._b, self._c = (emit.place(places, i) for i in range(3))

    def clear(self) -> None:
        """Sums are 0."""
        for register in range(2 * self._halves):
            self._emit.call("llvm.x86.tilezero", VOID, INT8(register))

    def multiply(self, index: Any) -> None:
        """Add the products of 64 bytes of each row, those number `index`."""
        emit, builder = self._emit, self._emit.builder
        b_row, a_column = builder.mul(index, INT64(_PANEL_BYTES)), builder.mul(index, INT64(_ROW_BYTES))
        for j in range(2):
            at = emit.at(self._b[0], builder.add(b_row, builder.mul(self._b[1], INT64(j))))
            self._load(6 + j, at, INT64(_ROW_BYTES))
        for half in range(self._halves):
            row_at = builder.mul(self._a[1], INT64(_ROWS * half))
            self._load(4 + half, emit.at(self._a[0], builder.add(a_column, row_at)), self._a[1])
            for j in range(2):
                emit.call(self._dot, VOID, INT8(2 * half + j), INT8(4 + half), INT8(6 + j))

    def store(self) -> None:
        """The sums to their place."""
        emit, builder = self._emit, self._emit.builder
        at, step = self._c
        for register in range(2 * self._halves):
            row_at = builder.mul(step, INT64(_ROWS * (register // 2)))
            place = emit.at(at, builder.add(row_at, INT64(register % 2 * _ROW_BYTES)))
            emit.call("llvm.x86.tilestored64", VOID, INT8(register), place, step)

    def _load(self, register: int, at: Any, step: Any) -> None:
        self._emit.call("llvm.x86.tileloadd64", VOID, INT8(register), at, step)


@_emit
def multiply_bf16_tile(typing: Any, places: Any, depth: Any) -> Any:
    """c[32, 32] = a @ b of bf16 numbers; `depth` counts 64 bytes of a row, panels of b are [depth / 2][16][2], sums
    fp32. places: (a, b, c).
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        if not knows_amx():
            return context.get_dummy_value()
        tile = _Tile(emit, args[0], "tdpbf16ps", 2)
        tile.clear()
        with emit.loop(args[1], []) as loop:
            tile.multiply(loop.index)
        tile.store()
        return context.get_dummy_value()

    return types.void(places, types.intp), generate


@_emit
def multiply_and_finish(typing: Any, places: Any, halves: Any, before: Any, how: Any, ahead: Any) -> Any:
    """c[16 * halves, 32] = a @ b of bytes, while the sums of the tile before are ended and weights to come are fetched.

    places: (a, b, c, depth in 64 bytes); before: a tile as finish.Finish has it; ahead: (address, cache
    lines per 64 bytes of a row). `halves` is 1 or 2.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        if not knows_amx():
            return context.get_dummy_value()
        tile, depth = _Tile(emit, args[0], "tdpbusd", halves.literal_value), builder.extract_value(args[0], 3)
        finish = Finish(emit, args[2], how.literal_value, is_int8=True)
        groups = builder.sdiv(builder.add(finish.num_rows, INT64(ROWS - 1)), INT64(ROWS))
        woven = emit.smaller(groups, depth)
        ahead_at, lines = emit.pointer(builder.extract_value(args[4], 0)), builder.extract_value(args[4], 1)
        tile.clear()
        with builder.if_then(builder.icmp_signed(">", woven, INT64(0))), emit.loop(woven, []) as loop:
            tile.multiply(loop.index)
            finish.rows(builder.mul(loop.index, INT64(ROWS)))
            _prefetch(emit, ahead_at, builder.mul(loop.index, lines), lines)
        left = builder.sub(depth, woven)
        with builder.if_then(builder.icmp_signed(">", left, INT64(0))), emit.loop(left, []) as loop:
            index = builder.add(woven, loop.index)
            tile.multiply(index)
            _prefetch(emit, ahead_at, builder.mul(index, lines), lines)
        finish.rest(builder.mul(woven, INT64(ROWS)))
        tile.store()
        return context.get_dummy_value()

    return types.void(places, halves, before, how, ahead), generate


def _prefetch(emit: Emitter, at: Any, first: Any, count: Any) -> None:
    builder = emit.builder
    with builder.if_then(builder.icmp_signed(">", count, INT64(0))), emit.loop(count, []) as loop:
        line = builder.mul(builder.add(first, loop.index), INT64(_CACHE_LINE_BYTES))
        emit.call("llvm.prefetch.p0", VOID, emit.at(at, line), INT32(0), INT32(2), INT32(1))


@_emit
def configure_amx(typing: Any, shapes: Any) -> Any:
    """Set this thread's tile registers up; `shapes`: 64 bytes, see `features.amx_shapes`."""
    signature = types.void(shapes)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        if knows_amx():
            emit.call("llvm.x86.ldtilecfg", VOID, emit.array(signature.args[0], args[0]))
        return context.get_dummy_value()

    return signature, generate


@_emit
def release_amx(typing: Any) -> Any:
    """Give the tile registers back, so that switching threads does not save them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if knows_amx():
            Emitter(context, builder).call("llvm.x86.tilerelease", VOID)
        return context.get_dummy_value()

    return types.void(), generate
