"""Scratch memory that is kept between steps."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.attention.metadata import ForwardMetadata
from engine.cpu.attention import AttentionScratch, HeadShape
from engine.cpu.chunk_head import KEY_TILE, QUERY_BLOCK, TILE_ROWS
from engine.cpu.memory import aligned
from engine.cpu.vectors import KEYS


class Buffers:
    """Named arrays that grow when more is asked for. For one thread at a time."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def get(self, name: str, size: int, dtype: Any = np.float32) -> NDArray[Any]:
        """At least `size` elements, holding whatever they last held."""
        found = self._arrays.get(name)
        if found is None or found.size < size:
            found = self._arrays[name] = aligned(size + size // 2, dtype)
        return found

    def attention(self, shape: HeadShape, metadata: ForwardMetadata) -> AttentionScratch:
        """What one thread needs to attend in a step."""
        context = int(metadata.context_lens.max()) + 2 * KEY_TILE
        rows = max(QUERY_BLOCK if metadata.chunks else 0, shape.num_heads)
        packed = context * (shape.head_dim + 16) if metadata.chunks else 0
        return AttentionScratch(
            scores=self.get("scores", rows * context),
            keys=self.get("keys", packed),
            values=self.get("values", packed),
            tile=self.get("tile", max(TILE_ROWS * KEY_TILE, KEYS * shape.head_dim)),
            factors=self.get("query_factors", max(QUERY_BLOCK, shape.num_heads)),
        )
