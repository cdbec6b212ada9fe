"""Chunks and their extents: (layer, head, block) cells, how they are cut and checksummed, which have arrived.

A chunk's xxh3-64 is seeded with a hash of transfer id, attempt, sequence number, extent and length. Correct bytes of
another transfer, attempt or extent therefore fail verification. This guards against faults, not against a malicious
sender: senders are authenticated.
"""

import asyncio
import struct
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from mesh.domain.errors import TransferCorrupt, TransferFailed
from mesh.domain.kv import KVLayout, KVSpan, Span

_IDENTITY = struct.Struct("<QQQQQQQQ")
_FOLD = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Extent:
    """Some blocks of a transfer, by index, in some layers and KV heads."""

    blocks: Span
    span: KVSpan

    def num_bytes(self, layout: KVLayout) -> int:
        """Return the length of the payload."""
        return self.blocks.count * self.span.num_layer_heads * layout.cell_bytes

    def is_inside(self, blocks: Span, span: KVSpan) -> bool:
        """Return True if the extent is not empty and lies within these blocks, layers and heads."""
        return self.blocks.is_inside(blocks) and self.span.is_inside(span)

    def joined(self, other: "Extent") -> "Extent | None":
        """Return the union if `other` continues this extent in layers or in blocks, else None."""
        if self.span.heads != other.span.heads:
            return None
        layers, other_layers = self.span.layers, other.span.layers
        if self.blocks == other.blocks and other_layers.first == layers.end:
            return self._with_layers(Span(layers.first, layers.count + other_layers.count))
        if layers == other_layers and other.blocks.first == self.blocks.end:
            return replace(self, blocks=Span(self.blocks.first, self.blocks.count + other.blocks.count))
        return None

    def split_layers(self, num_layers: int) -> "tuple[Extent, Extent]":
        """Return the first `num_layers` layers and the remaining ones."""
        head, tail = self.span.layers.split(num_layers)
        return self._with_layers(head), self._with_layers(tail)

    def split_blocks(self, num_blocks: int) -> "tuple[Extent, Extent]":
        """Return the first `num_blocks` blocks and the remaining ones."""
        head, tail = self.blocks.split(num_blocks)
        return replace(self, blocks=head), replace(self, blocks=tail)

    def _with_layers(self, layers: Span) -> "Extent":
        return Extent(self.blocks, KVSpan(layers, self.span.heads))


class ExtentQueue:
    """Announced extents that have not been taken. Small adjacent ones are joined, large ones are cut."""

    def __init__(self, layer_block_bytes: int, max_bytes: int) -> None:
        self._max_layer_blocks = max(1, max_bytes // layer_block_bytes)
        self._extents: deque[Extent] = deque()
        self._changed = asyncio.Event()
        self._is_finished = False

    def __bool__(self) -> bool:
        return bool(self._extents)

    def add(self, extent: Extent) -> None:
        """Append `extent`, or join it to the last one if it continues that."""
        joined = self._extents[-1].joined(extent) if self._extents else None
        if joined is None:
            self._extents.append(extent)
        else:
            self._extents[-1] = joined
        self._changed.set()

    def finish(self) -> None:
        """Declare that nothing more will be added."""
        self._is_finished = True
        self._changed.set()

    async def wait(self) -> bool:
        """Return True once there is an extent to take, False once the queue is finished and empty."""
        while not self._extents:
            if self._is_finished:
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    def take(self) -> Extent:
        """Remove and return the extent of the next chunk: whole layers if they fit, else a part of one layer."""
        extent = self._extents.popleft()
        max_layers = max(1, self._max_layer_blocks // extent.blocks.count)
        if extent.span.layers.count > max_layers:
            extent, tail = extent.split_layers(max_layers)
            self._extents.appendleft(tail)
        if extent.blocks.count * extent.span.layers.count > self._max_layer_blocks:
            extent, tail = extent.split_blocks(self._max_layer_blocks)
            self._extents.appendleft(tail)
        return extent


class Coverage:
    """Records which (layer, head, block) cells of a transfer have arrived. Each must arrive exactly once."""

    def __init__(self, blocks: Span, span: KVSpan) -> None:
        self._blocks = blocks
        self._span = span
        self._seen = np.zeros((span.layers.count, span.heads.count, blocks.count), dtype=np.bool_)

    def claim(self, extent: Extent) -> None:
        """Mark `extent` as arrived. Raises TransferCorrupt if it is empty, outside, or overlaps an earlier one."""
        if not extent.is_inside(self._blocks, self._span):
            raise TransferCorrupt(f"{extent} is outside of the reservation")
        cells = self._seen[
            extent.span.layers.slice_in(self._span.layers),
            extent.span.heads.slice_in(self._span.heads),
            extent.blocks.slice_in(self._blocks),
        ]
        if cells.any():
            raise TransferCorrupt(f"{extent} has arrived before, in part or in full")
        cells[:] = True

    def require_full(self) -> None:
        """Raise TransferFailed, with the number of missing cells, unless everything has arrived."""
        missing = self._seen.size - int(np.count_nonzero(self._seen))
        if missing:
            raise TransferFailed(f"{missing} of {self._seen.size} blocks (counted per layer and head) never arrived")


def transfer_seed(transfer_id: str, attempt: int) -> int:
    """Return the seed that makes the checksums of one transfer differ from those of all others."""
    return xxhash.xxh3_64_intdigest(transfer_id.encode(), seed=attempt)


def chunk_seed(seed: int, sequence_number: int, extent: Extent, num_bytes: int) -> int:
    """Return the seed of the checksum of one chunk; `seed` is the transfer's."""
    axes = (extent.blocks, extent.span.layers, extent.span.heads)
    bounds = [number for axis in axes for number in (axis.first, axis.count)]
    identity = _IDENTITY.pack(sequence_number, *bounds, num_bytes)
    return xxhash.xxh3_64_intdigest(identity, seed=seed)


class Digest:
    """A hash over the checksums of a transfer's chunks, in sequence order."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, checksum: int) -> None:
        """Add the checksum of the next chunk."""
        self.value = xxhash.xxh3_64_intdigest(_FOLD.pack(self.value, checksum))
