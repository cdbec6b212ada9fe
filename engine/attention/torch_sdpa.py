"""Attention with torch's own scaled_dot_product_attention, on any device and dtype; context is gathered from blocks.

Soft-capped scores it does not know: these are computed step by step.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.backend import AttentionShape, write_slots
from engine.attention.metadata import Chunk, ForwardMetadata

# A mask never has more elements than this; longer chunks are cut into tiles of queries.
MAX_MASK_ELEMENTS = 2**24


class TorchAttention:
    """Decodes in one padded batch, each chunk by itself."""

    name = "torch"

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def write(self, keys: Tensor, values: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
        """See AttentionBackend.write."""
        write_slots(keys, values, layer_cache, slot_mapping)

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer_cache: Tensor,
        window: int | None,
        metadata: ForwardMetadata,
    ) -> Tensor:
        """See AttentionBackend.attend."""
        write_slots(keys, values, layer_cache, metadata.slot_mapping)
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if metadata.num_decodes:
            out[: metadata.num_decodes] = self._attend_decodes(queries, layer_cache, window, metadata)
        for chunk in metadata.chunks:
            rows = slice(chunk.query_start, chunk.query_end)
            own = (queries[rows], keys[rows], values[rows])
            out[rows] = self._attend_chunk(own, layer_cache, window, chunk, metadata)
        return out

    def _attend_decodes(
        self, queries: Tensor, layer_cache: Tensor, window: int | None, metadata: ForwardMetadata
    ) -> Tensor:
        # -> [num_decodes, num_heads, head_dim]
        num_decodes, block_size = metadata.num_decodes, layer_cache.shape[2]
        num_blocks = -(-metadata.max_decode_context // block_size)
        tables = metadata.block_tables[:num_decodes, :num_blocks]
        # [num_decodes, num_blocks, block_size, num_kv_heads, head_dim] -> [num_decodes, num_kv_heads, keys, head_dim]
        keys, values = (layer_cache[i][tables].flatten(1, 2).transpose(1, 2).to(queries.dtype) for i in range(2))
        mask = self._decode_mask(metadata, keys.shape[2], window, queries.dtype)
        return self._weigh(queries[:num_decodes, :, None], keys, values, mask)[:, :, 0]

    def _attend_chunk(
        self,
        own: tuple[Tensor, Tensor, Tensor],
        layer_cache: Tensor,
        window: int | None,
        chunk: Chunk,
        metadata: ForwardMetadata,
    ) -> Tensor:
        """Causal attention of one chunk; `own` are its queries, keys and values -> [num_queries, num_heads, ...]."""
        queries, keys, values = (heads.transpose(0, 1)[None] for heads in own)  # [1, heads, num_queries, head_dim]
        whole = chunk.first_position == 0 and (window is None or window >= chunk.context_len)
        if whole and self._shape.is_plain:
            return self._weigh(queries, keys, values, None)[0].transpose(0, 1)
        first_key = 0
        if chunk.first_position > 0:
            keys, values, first_key = _gather(layer_cache, window, chunk, metadata)
            keys, values = keys[None].to(queries.dtype), values[None].to(queries.dtype)
        tile = max(1, MAX_MASK_ELEMENTS // (keys.shape[2] * (1 if self._shape.is_plain else self._shape.num_heads)))
        outs = []
        for start in range(0, chunk.num_queries, tile):
            end = min(start + tile, chunk.num_queries)
            num_keys = chunk.first_position + end - first_key
            mask = self._chunk_mask(metadata, chunk, (start, end, first_key), window, queries)
            part = self._weigh(queries[:, :, start:end], keys[:, :, :num_keys], values[:, :, :num_keys], mask)
            outs.append(part[0].transpose(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _weigh(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Values weighted by softmax of scores, all [batch, heads, tokens, head_dim]; without a mask, causal."""
        shape = self._shape
        if mask is None or shape.softcap is None:
            return scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=shape.scale,
                enable_gqa=shape.group_size > 1,
            )
        keys, values = (heads.repeat_interleave(shape.group_size, 1) for heads in (keys, values))
        scores = torch.tanh(queries @ keys.transpose(2, 3) * (shape.scale / shape.softcap)) * shape.softcap
        return (scores + mask).softmax(-1, dtype=torch.float32).to(values.dtype) @ values

    def _decode_mask(self, metadata: ForwardMetadata, num_keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive [num_decodes, 1 or num_heads, 1, num_keys]."""
        cache_key = ("decode", window)
        if cache_key not in metadata.masks:
            lens = metadata.context_lens[: metadata.num_decodes, None]
            distance = lens - 1 - torch.arange(num_keys, device=lens.device)
            metadata.masks[cache_key] = self._mask(distance, window, dtype)[:, :, None]
        return metadata.masks[cache_key]

    def _chunk_mask(
        self, metadata: ForwardMetadata, chunk: Chunk, bounds: tuple[int, int, int], window: int | None, like: Tensor
    ) -> Tensor:
        """Additive [1 or num_heads, queries, keys] for queries `[start, end)` of a chunk, keys from `first_key` on."""
        start, end, first_key = bounds
        whole = end - start == chunk.num_queries
        cache_key = ("chunk", chunk.row, window)
        if whole and cache_key in metadata.masks:
            return metadata.masks[cache_key]
        query_positions = torch.arange(chunk.first_position + start, chunk.first_position + end, device=like.device)
        key_positions = torch.arange(first_key, chunk.first_position + end, device=like.device)
        mask = self._mask(query_positions[:, None] - key_positions, window, like.dtype).transpose(0, 1)
        if whole:
            metadata.masks[cache_key] = mask
        return mask

    def _mask(self, distance: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive [queries, 1 or num_heads, keys] for distances [queries, keys] from query to key."""
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        mask = torch.zeros(distance.shape, dtype=dtype, device=distance.device)[:, None]
        if self._shape.alibi is not None:
            slopes = torch.tensor(self._shape.alibi, device=distance.device)
            mask = (-slopes[:, None] * distance[:, None]).to(dtype)
        return mask.masked_fill(hidden[:, None], float("-inf"))


def _gather(
    layer_cache: Tensor, window: int | None, chunk: Chunk, metadata: ForwardMetadata
) -> tuple[Tensor, Tensor, int]:
    """Keys and values [num_kv_heads, num_keys, head_dim] that the chunk can see, and the position of the first."""
    block_size = layer_cache.shape[2]
    first_block = 0 if window is None else max(0, chunk.first_position - window + 1) // block_size
    end_block = -(-chunk.context_len // block_size)
    first_key = first_block * block_size
    table = metadata.block_tables[chunk.row, first_block:end_block]
    # [2, num_blocks, block_size, num_kv_heads, head_dim] -> [2, num_keys, num_kv_heads, head_dim]
    context = layer_cache.index_select(1, table).flatten(1, 2)[:, : chunk.context_len - first_key]
    return context[0].transpose(0, 1), context[1].transpose(0, 1), first_key
