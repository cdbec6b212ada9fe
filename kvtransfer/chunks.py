"""Rectangles of (layer, block position): how they are cut into chunks, and which have arrived."""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from mesh.domain.errors import TransferCorrupt, TransferFailed
from mesh.domain.kv import KVLayout


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Block positions [first_block, first_block + num_blocks) of layers [first_layer, first_layer + num_layers)."""

    first_block: int
    num_blocks: int
    first_layer: int
    num_layers: int

    def num_bytes(self, layout: KVLayout) -> int:
        """Length of the payload."""
        return self.num_blocks * self.num_layers * layout.layer_block_bytes

    def is_inside(self, first_block: int, end_block: int, num_layers: int) -> bool:
        """True if not empty and within block positions [first_block, end_block) and the model's layers."""
        return (
            first_block <= self.first_block < self.first_block + self.num_blocks <= end_block
            and 0 <= self.first_layer < self.first_layer + self.num_layers <= num_layers
        )

    def joined(self, other: "ChunkRange") -> "ChunkRange | None":
        """The rectangle of both if `other` continues this one in layers or in blocks."""
        same_blocks = (self.first_block, self.num_blocks) == (other.first_block, other.num_blocks)
        if same_blocks and other.first_layer == self.first_layer + self.num_layers:
            return replace(self, num_layers=self.num_layers + other.num_layers)
        same_layers = (self.first_layer, self.num_layers) == (other.first_layer, other.num_layers)
        if same_layers and other.first_block == self.first_block + self.num_blocks:
            return replace(self, num_blocks=self.num_blocks + other.num_blocks)
        return None

    def split_layers(self, num_layers: int) -> "tuple[ChunkRange, ChunkRange]":
        """The first `num_layers` layers, and the rest."""
        rest = replace(self, first_layer=self.first_layer + num_layers, num_layers=self.num_layers - num_layers)
        return replace(self, num_layers=num_layers), rest

    def split_blocks(self, num_blocks: int) -> "tuple[ChunkRange, ChunkRange]":
        """The first `num_blocks` blocks, and the rest."""
        rest = replace(self, first_block=self.first_block + num_blocks, num_blocks=self.num_blocks - num_blocks)
        return replace(self, num_blocks=num_blocks), rest


class PushQueue:
    """What has been pushed and not yet taken; small neighbours are joined, large pieces are cut."""

    def __init__(self, layout: KVLayout, max_bytes: int) -> None:
        self._max_layer_blocks = max(1, max_bytes // layout.layer_block_bytes)
        self._pieces: deque[ChunkRange] = deque()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, piece: ChunkRange) -> None:
        """Append `piece`, as part of the last one if it continues it."""
        joined = self._pieces[-1].joined(piece) if self._pieces else None
        if joined is None:
            self._pieces.append(piece)
        else:
            self._pieces[-1] = joined

    def take(self) -> ChunkRange:
        """Remove and return the next chunk's range: whole layers if they fit, else part of one layer."""
        piece = self._pieces.popleft()
        max_layers = max(1, self._max_layer_blocks // piece.num_blocks)
        if piece.num_layers > max_layers:
            piece, rest = piece.split_layers(max_layers)
            self._pieces.appendleft(rest)
        if piece.num_blocks * piece.num_layers > self._max_layer_blocks:
            piece, rest = piece.split_blocks(self._max_layer_blocks)
            self._pieces.appendleft(rest)
        return piece


class Coverage:
    """Which (layer, block position) of a transfer have arrived: each exactly once."""

    def __init__(self, num_layers: int, first_block: int, end_block: int) -> None:
        self._first_block = first_block
        self._end_block = end_block
        self._seen = np.zeros((num_layers, end_block - first_block), dtype=np.bool_)

    def claim(self, piece: ChunkRange) -> None:
        """Mark `piece`. Raises TransferCorrupt if it is outside, empty, or overlaps what was claimed before."""
        if not piece.is_inside(self._first_block, self._end_block, len(self._seen)):
            raise TransferCorrupt(f"{piece} is outside of the reservation")
        start = piece.first_block - self._first_block
        cells = self._seen[piece.first_layer : piece.first_layer + piece.num_layers, start : start + piece.num_blocks]
        if cells.any():
            raise TransferCorrupt(f"{piece} has arrived before, in part or whole")
        cells[:] = True

    def require_full(self) -> None:
        """Raise TransferFailed that says how much is missing, unless everything has arrived."""
        missing = self._seen.size - int(np.count_nonzero(self._seen))
        if missing:
            raise TransferFailed(f"{missing} of {self._seen.size} blocks (counted per layer) never arrived")
