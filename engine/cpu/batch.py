"""A step's tokens as compiled loops read them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.backend import AttentionShape
from engine.attention.metadata import ForwardMetadata
from engine.cpu.attention import HeadShape
from engine.cpu.features import why_no_loops
from engine.cpu.ir import LOG2_E
from engine.cpu.vectors import KEYS
from mesh.domain.kv import KVLayout

_CACHE_DTYPES = ("float32", "float16", "int8")
NO_WINDOW = int(np.iinfo(np.int32).max)
_NOTHING: NDArray[np.float32] = np.empty((0, 0), np.float32)


class Batch(NamedTuple):
    """See attention.metadata.ForwardMetadata."""

    slots: Any  # [num_tokens] int64
    parts: Any  # [num_seqs, max_blocks * block_size / KEYS] int64: first slot of each KEYS tokens
    context_lens: Any  # [num_seqs] int32
    prompt_lens: Any  # [num_seqs] int32
    query_starts: Any  # [num_seqs + 1] int32
    cos: Any  # [num_tokens, head_dim]; [0, 0] where nothing is rotated
    sin: Any  # the same; the first half negated

    @classmethod
    def of(cls, metadata: ForwardMetadata, block_size: int, rotation: tuple[Tensor, Tensor] | None = None) -> "Batch":
        """`rotation`: as `RotaryEmbedding.cos_sin` gives it."""
        starts = metadata.block_tables.numpy().astype(np.int64) * block_size
        parts = starts[:, :, None] + np.arange(0, block_size, KEYS)
        cos, sin = (_NOTHING, _NOTHING) if rotation is None else (part[:, 0].numpy() for part in rotation)
        return cls(
            slots=metadata.slot_mapping.numpy(),
            parts=parts.reshape(len(parts), -1),
            context_lens=metadata.context_lens.numpy(),
            prompt_lens=metadata.prompt_lens.numpy(),
            query_starts=metadata.query_starts.numpy(),
            cos=cos,
            sin=sin,
        )


def head_shape(shape: AttentionShape, layer_cache: Tensor) -> HeadShape:
    """For a layer's cache [2, num_blocks, block_size, num_kv_heads, elements of a row]."""
    _, num_blocks, block_size, _, row = layer_cache.shape
    scale = np.float32(shape.scale * LOG2_E)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    return HeadShape(*heads, row * layer_cache.element_size(), block_size, num_blocks * block_size, scale)


def why_not_paged(layout: KVLayout) -> str | None:
    """What keeps the loops of `engine/cpu/attention.py` from reading a cache; None if nothing does."""
    if layout.dtype not in _CACHE_DTYPES:
        return f"KV in {layout.dtype}, not {', '.join(_CACHE_DTYPES)}"
    if layout.head_dim % KEYS:
        return f"heads of {layout.head_dim}, not a multiple of {KEYS}"
    if layout.block_size % KEYS:
        return f"blocks of {layout.block_size} tokens, not a multiple of {KEYS}"
    return why_no_loops(int8=layout.dtype == "int8")
