"""FlashAttention: the flash-attn library, which reads the blocks in place. CUDA, fp16 and bf16 (Dao 2023)."""

from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, AttentionShape, ForwardMetadata

# FlashAttention 2 requires that the page size is a multiple of 256 tokens.
PAGE_TOKENS = 256
MAX_HEAD_DIM = 256


_NEEDED = {
    "flash_attn_with_kvcache": ("block_table", "window_size", "softcap", "alibi_slopes"),
    "flash_attn_varlen_func": ("block_table", "window_size", "softcap", "alibi_slopes"),
}
"""Functions of the library and the arguments that they are called with. Releases before 2.6 lack some."""


def why_no_flash_attn() -> str | None:
    """The reason why the library cannot be used; None if it can. Imports it, if it is installed."""
    if find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    try:
        library = import_module("flash_attn")
    except (ImportError, OSError) as error:  # built for another torch or another CUDA
        return f"flash-attn cannot be imported: {error}"
    for name, needed in _NEEDED.items():
        has = signature(getattr(library, name)).parameters if hasattr(library, name) else ()
        if lacking := [argument for argument in needed if argument not in has]:
            return f"flash-attn {getattr(library, '__version__', '')} is too old: {name} takes no {', '.join(lacking)}"
    return None


class FlashAttention(AttentionBackend):
    """Makes one library call for all decodes and one for all chunks."""

    name = "flash"

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._slopes: Tensor | None = None
        self._library: Any = import_module("flash_attn")

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer_cache: Tensor,
        window: int | None,
        metadata: ForwardMetadata,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self.write(keys, values, layer_cache, metadata.slot_mapping)
        span = (-1, -1) if window is None else (window - 1, 0)
        num_decodes = metadata.num_decodes
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if num_decodes:
            decoded = self._library.flash_attn_with_kvcache(
                queries[:num_decodes, None],
                layer_cache[0],
                layer_cache[-1],
                cache_seqlens=metadata.context_lens[:num_decodes],
                block_table=metadata.block_tables[:num_decodes],
                window_size=span,
                **self._scores(queries.device),
            )
            out[:num_decodes] = decoded[:, 0]
        if metadata.chunks:
            out[num_decodes:] = self._attend_chunks(queries[num_decodes:], layer_cache, span, metadata)
        return out

    def _attend_chunks(
        self, queries: Tensor, layer_cache: Tensor, span: tuple[int, int], metadata: ForwardMetadata
    ) -> Tensor:
        num_decodes = metadata.num_decodes
        lens = metadata.context_lens[num_decodes:]
        key_starts = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
        result: Tensor = self._library.flash_attn_varlen_func(
            queries,
            layer_cache[0],
            layer_cache[-1],
            cu_seqlens_q=metadata.query_starts[num_decodes:] - num_decodes,
            cu_seqlens_k=key_starts,
            max_seqlen_q=metadata.max_chunk_queries,
            max_seqlen_k=metadata.max_chunk_context,
            window_size=span,
            **self._scores(queries.device),
            block_table=metadata.block_tables[num_decodes:],
        )
        return result

    def _scores(self, device: torch.device) -> dict[str, Any]:
        """The treatment of scores as keyword arguments of the library."""
        shape = self._shape
        if shape.alibi is not None and self._slopes is None:  # once: a captured step must not make it of numbers
            self._slopes = torch.tensor(shape.alibi, dtype=torch.float32, device=device)
        return {
            "softmax_scale": shape.scale,
            "causal": True,
            "softcap": shape.softcap or 0.0,
            "alibi_slopes": self._slopes,
        }
