"""Tiles of as many rows as are left of a product, for weights of all types."""

import itertools
from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

from numba import types

from engine.kernels.cpu.compilation.emitter import (
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
    emitted,
)
from engine.kernels.cpu.machine import (
    FLOAT_BYTES,
    PANEL,
    UNIT,
    VECTOR_BYTES,
    knows_avx512,
    knows_bf16,
    knows_vnni,
    outruns_memory,
)
from engine.kernels.cpu.products.nibble_numbers import Numbers
from engine.kernels.cpu.products.nibbles import write_nibble_tile
from engine.kernels.cpu.products.steps import HEAD_BYTES, PASSES, Steps, read_steps, unpacked
from engine.kernels.cpu.products.tiles import TilePart, add_passes, write_tile

_PANELS = UNIT // PANEL
_MOST_ROWS = 12
_FASTEST = {types.int8: (1, 10), types.int16: (1, 12), types.float32: (3, 12)}
"""On a CPU that outruns memory: the only tile of a unit has the second number of rows, from the first number on."""
_MOST_IN_TURN = {types.int8: 2 * _MOST_ROWS, types.int16: 3 * _MOST_ROWS}
"""The most rows of a unit whose first two tiles ask for a panel of the next one each: with both to ask for, the first
tile waits for memory, which the second one leaves idle. int4 gained nothing, and fp32 took longer.
"""


def _has_instruction(element: NumbaType) -> bool:
    """True if the CPU multiplies these numbers, four or two at once, as they are."""
    return (element in (types.int8, types.int64) and knows_vnni()) or (element == types.int16 and knows_bf16())


def _sizes(element: NumbaType) -> tuple[int, ...]:
    """Rows of the tiles, fewest first. `element`: any element of the weights.

    With AVX2, arithmetic limits even a few rows, so that rows which are multiplied in vain take time; with AVX-512
    memory limits up to eight. A core gets weights sooner if it asks for the next ones while it multiplies eight rows:
    in a tile of fewer it is ahead of them, and its loads crowd out what it asks for
    (docs/performance-notes.md#products-and-memory).
    """
    if not knows_avx512():
        return tuple(range(1, _MOST_ROWS + 1))
    is_unpacked = element == types.int64 or isinstance(element, Numbers)
    if is_unpacked and knows_vnni():  # unpacking leaves no time for eight rows
        return (4, 8, 10, 12)
    return (8, 10, 12) if _has_instruction(element) else (1, 2, 4, 8, 10, 12)


@emitted
def multiply_rows(
    typing: TypingContext,
    matrices: NumbaType,
    group: NumbaType,
    rows: NumbaType,
    ahead: NumbaType,
    element: NumbaType,
) -> Intrinsic:
    """Multiply the next tile of a unit: the first of the rows in `rows`, a Range, at which the TileProduct begins.
    Returns the number of rows, which may be more than there are.

    Meanwhile the first tile, or the first two, prefetch the weights `ahead` bytes further, unless that is 0. `group`:
    inputs that share a scale in int4 and fp8. `element`: any element of the weights.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit, (product, group, rows, distance, _) = Emitter(context, builder), args
        (_, a_step), (_, panel_bytes) = (emit.matrix(matrix) for matrix in emit.members(product, 2))
        first, end = emit.members(rows, 2)
        place = _Place(first, end, distance, panel_bytes)
        ahead = _ahead(builder, place, _MOST_IN_TURN.get(element, 0) if knows_avx512() else 0)

        def write(size: int) -> None:
            if isinstance(element, Numbers):
                write_nibble_tile(emit, product, a_step, group, (size, _PANELS), ahead[0], element.numbers)
                return
            depth = builder.udiv(a_step, INT64(FLOAT_BYTES))  # one fp32, 2 of two bytes or 4 of one
            if element == types.int64:
                write_tile(emit, product, depth, (size, _PANELS), element, ahead, add_all=_add_stepped)
                return
            if element in (types.boolean, types.uint32):
                # Units of several forms: one tile for both cases takes half as long to compile, and 1 % longer to run.
                own_group = group if element == types.boolean else None
                write_tile(emit, product, depth, (size, _PANELS), element, ahead, own_group)
                return
            with builder.if_else(builder.icmp_signed("!=", ahead[0], INT64(0))) as (prefetches, does_not):
                with prefetches:
                    write_tile(emit, product, depth, (size, _PANELS), element, ahead)
                with does_not:
                    write_tile(emit, product, depth, (size, _PANELS), element)

        return _write_tiles(emit, _num_rows(builder, place, element), _sizes(element), write)

    return types.intp(matrices, types.intp, rows, types.intp, element), generate


def _add_stepped(
    emit: Emitter, part: TilePart, depth: Value, panels_at: list[Value], totals: list[Value]
) -> list[Value]:
    """totals [rows * panels] and the products of all groups of panels; `depth` as of `multiply_tile`."""
    builder, (a_at, a_step), numbers = emit.builder, part.a, part.arithmetic.numbers
    num_groups = builder.udiv(depth, INT64(PASSES * numbers))
    weights_at = [emit.at(at, builder.mul(num_groups, INT64(HEAD_BYTES))) for at in panels_at]
    with emit.loop(num_groups, totals) as loop:
        heads_at = [emit.at(at, builder.mul(loop.index, INT64(HEAD_BYTES))) for at in panels_at]
        for at, distance in zip(heads_at if part.ahead else [], part.ahead, strict=True):
            emit.prefetch(emit.at(at, distance), to_l2=part.to_l2)
        groups = [read_steps(emit, at) for at in heads_at]

        def weights(panel: int, at: Value, number: int, groups: list[Steps] = groups) -> Value:
            half, place = divmod(number, numbers // 2)
            lanes = unpacked(emit, emit.load(at, INTS), half, groups[panel])
            if knows_vnni():
                return lanes
            return emit.odd_bytes(lanes) if place else emit.even_bytes(lanes)

        a_bytes = builder.mul(loop.index, INT64(PASSES * numbers * FLOAT_BYTES))
        own = part._replace(a=(emit.at(a_at, a_bytes), a_step))
        now_at = [emit.at(at, builder.mul(loop.index, INT64(PASSES * VECTOR_BYTES))) for at in weights_at]
        loop.next = add_passes(emit, own, INT64(PASSES), now_at, loop.carried, weights)
    return loop.next


class _Place(NamedTuple):
    """The first row of a tile, the end of all rows, how far ahead weights are prefetched, and bytes of a panel."""

    first: Value
    end: Value
    ahead: Value
    panel_bytes: Value

    def is_first(self, builder: Builder) -> Value:
        return builder.icmp_signed("==", self.first, INT64(0))

    def fetches_units(self, builder: Builder) -> Value:
        """Whether it is the next unit that is prefetched. Larger ones are prefetched a little ahead."""
        return builder.icmp_signed("==", self.ahead, builder.mul(self.panel_bytes, INT64(_PANELS)))


def _num_rows(builder: Builder, place: _Place, element: NumbaType) -> Value:
    """The number of rows for which a tile is chosen: those that are left, or more, which are multiplied in vain."""
    left = builder.sub(place.end, place.first)
    if not outruns_memory() or element not in _FASTEST or not (element == types.float32 or _has_instruction(element)):
        return left
    fewest, most = map(INT64, _FASTEST[element])
    is_between = builder.and_(builder.icmp_signed(">=", left, fewest), builder.icmp_signed("<", left, most))
    conditions = (place.is_first(builder), place.fetches_units(builder), is_between)
    return builder.select(reduce(builder.and_, conditions), most, left)


def _ahead(builder: Builder, place: _Place, most_in_turn: int) -> tuple[Value, Value]:
    """For each panel of the unit how many bytes further weights are prefetched during the tile; 0: none are. In turn,
    both panels ask for the same line, so that one code serves both ways of fetching.
    """
    none, ahead, panel = INT64(0), place.ahead, place.panel_bytes
    is_first = place.is_first(builder)
    both = builder.select(is_first, ahead, none)
    if not most_in_turn:
        return both, both
    has_two = builder.icmp_signed(">", place.end, INT64(_MOST_ROWS))
    has_few = builder.icmp_signed("<=", place.end, INT64(most_in_turn))
    in_turn = reduce(builder.and_, (place.fetches_units(builder), has_two, has_few))
    # The first two tiles have more rows than one can have.
    is_second = builder.and_(builder.not_(is_first), builder.icmp_signed("<=", place.first, INT64(_MOST_ROWS)))
    distances = []
    for of_first, of_second in ((ahead, builder.add(ahead, panel)), (builder.sub(ahead, panel), ahead)):
        of_others = builder.select(is_second, of_second, none)
        distances.append(builder.select(in_turn, builder.select(is_first, of_first, of_others), both))
    return distances[0], distances[1]


def _first_size(num_rows: int, sizes: tuple[int, ...]) -> int:
    """Rows of the first of the one or two tiles in which the fewest rows are multiplied in vain."""
    if num_rows <= sizes[-1]:
        return next(size for size in sizes if size >= num_rows)
    pairs = (pair for pair in itertools.product(sizes, repeat=2) if sum(pair) >= num_rows)
    return min(pairs, key=lambda pair: (sum(pair), -pair[0]))[0]


def _write_tiles(emit: Emitter, num_rows: Value, sizes: tuple[int, ...], write: Callable[[int], None]) -> Value:
    """Write the code of all tiles, of which the first one for `num_rows` runs. Returns its rows."""
    ends: dict[int, Value] = {}

    def write_tile_of(size: int) -> None:
        write(size)
        ends[size] = emit.builder.block

    emit.choose(num_rows, [_first_size(count, sizes) for count in range(2 * sizes[-1])], write_tile_of)
    result = emit.builder.phi(INT64)
    for size, end in ends.items():
        result.add_incoming(INT64(size), end)
    return result
