"""Writes of tokens' keys and values to their slots of the KV cache."""

from typing import Any, NamedTuple

from engine.kernels.cpu.arguments import Address, Cache, Element, Floats, HeadShape, Int64s
from engine.kernels.cpu.attention.kv_segments import HeadSegments, head_of, write_head
from engine.kernels.cpu.compilation.compiler import entry, jit
from engine.kernels.cpu.compilation.pieces import Piece, caller, element_of
from engine.kernels.cpu.machine import FLOAT_BYTES, KEYS
from engine.kernels.cpu.vectors import address


class TokenSlot(NamedTuple):
    """A token's place in a layer of the cache."""

    layer: Address
    slot: int


@jit
def write_heads(keys: Address, values: Address, token_slot: TokenSlot, element: Element, shape: HeadShape) -> None:
    """Write one token's fp32 keys and values [num_kv_heads, head_dim] to its slot."""
    token_bytes = shape.num_kv_heads * shape.row_bytes
    token = token_slot.slot % KEYS
    segment = token_slot.layer + (token_slot.slot - token) * token_bytes
    for head in range(shape.num_kv_heads):
        at, target = head * shape.head_dim * FLOAT_BYTES, head_of(segment, head, shape, element)
        segments = HeadSegments(target, target + (shape.num_planes - 1) * shape.num_slots * token_bytes)
        write_head(keys + at, values + at, segments, token, shape, element)


@Piece
def write_token(kind: Any, keys: Address, values: Address, slot: TokenSlot, shape: HeadShape) -> None:
    """`write_heads`. kind: of KV."""
    write_heads(keys, values, slot, element_of(kind), shape)


call_write_token = caller(write_token)


@entry
def write_tokens(keys: Floats, values: Floats, slots: Int64s, cache: Cache, shape: HeadShape) -> None:
    """Write fp32 keys and values [num_tokens, num_kv_heads, head_dim] to their slots of a one-layer cache."""
    step = shape.num_kv_heads * shape.head_dim * FLOAT_BYTES
    for token in range(len(slots)):
        token_slot, at = TokenSlot(address(cache), slots[token]), token * step
        write_heads(address(keys) + at, address(values) + at, token_slot, cache[0], shape)
