"""Scratch memory that is kept between steps."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.attention.metadata import ForwardMetadata
from engine.cpu import chunk_amx
from engine.cpu.attention import AttentionScratch, HeadShape
from engine.cpu.byte_vectors import LIMBS_TAIL
from engine.cpu.chunk_head import KEY_TILE, QUERY_BLOCK, TILE_ROWS
from engine.cpu.memory import aligned
from engine.cpu.vectors import KEYS

_NO_HALVES: NDArray[np.uint16] = np.empty(0, np.uint16)


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

    def attention(self, shape: HeadShape, metadata: ForwardMetadata, *, bf16: bool = False) -> AttentionScratch:
        """What one thread needs to attend in a step; `bf16`: chunks in AMX's bf16."""
        context = int(metadata.context_lens.max()) + 2 * KEY_TILE
        has_prompt = bool((metadata.prompt_lens > metadata.context_lens - metadata.query_starts.diff()).any())
        rows = max(QUERY_BLOCK if has_prompt else 0, shape.num_heads)
        packed = context * (shape.head_dim + 16) if has_prompt else 0
        floats, halves = (0, packed) if bf16 else (packed, 0)
        tile = max(TILE_ROWS * KEY_TILE, 2 * KEYS * shape.head_dim, chunk_amx.QUERY_BLOCK * KEY_TILE)
        return AttentionScratch(
            scores=self.get("scores", rows * context),
            keys=self.get("keys", floats),
            values=self.get("values", floats),
            keys16=self.get("keys16", halves, np.uint16) if halves else _NO_HALVES,
            values16=self.get("values16", halves, np.uint16),
            rows16=self.get("rows16", chunk_amx.QUERY_BLOCK * max(context, shape.head_dim) if halves else 0, np.uint16),
            tile=self.get("tile", tile),
            factors=self.get("query_factors", max(QUERY_BLOCK, shape.num_heads)),
            limbs=self.get("limbs", shape.num_heads * (2 * shape.head_dim + LIMBS_TAIL), np.uint8),
        )
