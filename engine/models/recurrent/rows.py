"""Where recurrent states are: how many KV blocks the states of a sequence take, and the rows in them.

A sequence's state is bytes in KV blocks of its own, at the beginning of its block table, so that everything that knows
blocks only (reservation, transfer, preemption, the end of a sequence) needs to know no states. In these blocks the
numbers of a state are fp32, in rows that no other memory interrupts:

    block of a layer, keys or values    a piece: contiguous bytes
    piece                               rows of the same width, at most MAX_ROW numbers
    state of a sequence                 the states of its recurrent layers, each in whole rows; rows fill the pieces of
                                        a block, [layers, 2], and then those of the next
"""

from dataclasses import dataclass
from math import gcd

from engine.models.recurrent.config import NUMBER_BYTES, RecurrentConfig
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout

MAX_ROW = 128
"""Numbers of a row at most: a head of the gated delta net has rows of this width."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a sequence's state in the blocks of a layout: `width` numbers each, `in_piece` of them in a piece,
    `of_layer` for a recurrent layer.
    """

    width: int
    in_piece: int
    of_layer: int
    num_pieces: int
    num_blocks: int


def state_rows(recurrent: RecurrentConfig, layout: KVLayout) -> StateRows:
    """Raises ConfigurationError if blocks of this layout can hold no fp32 numbers."""
    piece_bytes = layout.layer_block_bytes // layout.num_planes
    if piece_bytes % NUMBER_BYTES:
        raise ConfigurationError(
            f"blocks of {layout.block_size} tokens hold no recurrent states: block_size must be a multiple of 4"
        )
    numbers = piece_bytes // NUMBER_BYTES
    width, num_pieces = gcd(numbers, MAX_ROW), layout.num_planes * layout.num_layers
    of_layer = -(-recurrent.state_numbers // width)
    rows_in_block = num_pieces * (numbers // width)
    num_blocks = -(-of_layer * sum(recurrent.layers) // rows_in_block)
    return StateRows(width, numbers // width, of_layer, num_pieces, num_blocks)
