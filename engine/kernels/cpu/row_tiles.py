"""Tiles of as many rows as are left of a product, for weights of all types."""

import itertools
from collections.abc import Callable

from numba import types

from engine.kernels.cpu.compiler import (
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
    emitted,
)
from engine.kernels.cpu.machine import FLOAT_BYTES, PANEL, UNIT, knows_avx512, knows_bf16, knows_vnni
from engine.kernels.cpu.nibbles import write_nibble_tile
from engine.kernels.cpu.tiles import write_tile

_PANELS = UNIT // PANEL


def _sizes(element: NumbaType) -> tuple[int, ...]:
    """Rows of the tiles, fewest first. `element`: any element of the weights.

    With AVX2, arithmetic limits even a few rows, so that rows which are multiplied in vain take time; with AVX-512
    memory limits up to eight. A core gets weights sooner if it asks for the next ones while it multiplies eight rows:
    in a tile of fewer it is ahead of them, and its loads crowd out what it asks for
    (docs/performance-notes.md#products-and-memory).
    """
    if not knows_avx512():
        return tuple(range(1, 13))
    if element == types.uint8 and knows_vnni():  # with its zeros and scales, a tile of eight rows takes too long
        return (4, 8, 10, 12)
    has_instruction = (element == types.int8 and knows_vnni()) or (element == types.int16 and knows_bf16())
    return (8, 10, 12) if has_instruction else (1, 2, 4, 8, 10, 12)


@emitted
def multiply_rows(
    typing: TypingContext,
    matrices: NumbaType,
    group: NumbaType,
    numbers: NumbaType,
    num_rows: NumbaType,
    ahead: NumbaType,
    element: NumbaType,
) -> Intrinsic:
    """Multiply the first tile of `num_rows` rows of a TileProduct; returns its rows, which may be more.

    `ahead`: see write_tile; 0: nothing is prefetched. `group`: inputs that share a scale in int4 and fp8;
    `numbers`: what the numbers of int4 are, see nibbles.py. `element`: any element of the weights.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit, (product, group, numbers, num_rows, ahead, _) = Emitter(context, builder), args
        a_step = emit.matrix(emit.members(product, 1)[0])[1]

        def write(size: int) -> None:
            if element == types.uint8:
                write_nibble_tile(emit, product, a_step, (group, numbers), (size, _PANELS), ahead)
                return
            depth = builder.udiv(a_step, INT64(FLOAT_BYTES))  # one fp32, 2 of two bytes or 4 of one
            if element in (types.boolean, types.uint32):
                # Units of several forms: one tile for both cases takes half as long to compile, and 1 % longer to run.
                own_group = group if element == types.boolean else None
                write_tile(emit, product, depth, (size, _PANELS), element, ahead, own_group)
                return
            with builder.if_else(builder.icmp_signed("!=", ahead, INT64(0))) as (prefetches, does_not):
                with prefetches:
                    write_tile(emit, product, depth, (size, _PANELS), element, ahead)
                with does_not:
                    write_tile(emit, product, depth, (size, _PANELS), element)

        return _write_tiles(builder, num_rows, _sizes(element), write)

    return types.intp(matrices, types.intp, types.intp, types.intp, types.intp, element), generate


def _first_size(num_rows: int, sizes: tuple[int, ...]) -> int:
    """Rows of the first of the one or two tiles in which the fewest rows are multiplied in vain."""
    if num_rows <= sizes[-1]:
        return next(size for size in sizes if size >= num_rows)
    pairs = (pair for pair in itertools.product(sizes, repeat=2) if sum(pair) >= num_rows)
    return min(pairs, key=lambda pair: (sum(pair), -pair[0]))[0]


def _write_tiles(builder: Builder, num_rows: Value, sizes: tuple[int, ...], write: Callable[[int], None]) -> Value:
    """Write the code of all tiles, of which the first one for `num_rows` runs. Returns its rows."""
    blocks = {size: builder.append_basic_block(f"rows_{size}") for size in sizes}
    switch, end = builder.switch(num_rows, blocks[sizes[-1]]), builder.append_basic_block("multiplied")
    for count in range(1, 2 * sizes[-1]):
        if (size := _first_size(count, sizes)) < sizes[-1]:
            switch.add_case(INT64(count), blocks[size])
    written: list[tuple[int, Value]] = []
    for size, block in blocks.items():
        builder.position_at_end(block)
        write(size)
        written.append((size, builder.block))
        builder.branch(end)
    builder.position_at_end(end)
    result = builder.phi(INT64)
    for size, block in written:
        result.add_incoming(INT64(size), block)
    return result
