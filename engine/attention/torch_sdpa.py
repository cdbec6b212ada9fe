"""TorchAttention: torch's scaled_dot_product_attention, on any device and dtype. Context is gathered from blocks.

torch's function has no soft cap, so attention with soft-capped scores is computed with separate operations. It has no
sinks either: they are the scores, in the mask, of one more key that is 0, and so is its value.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from engine.attention.backend import AttentionBackend, AttentionShape, Chunk, ForwardMetadata
from engine.kv.dtypes import as_bytes, pair_as_stored

# Limit on the elements of a mask; longer chunks are split into tiles of queries.
MAX_MASK_ELEMENTS = 2**24


class TorchAttention(AttentionBackend):
    """Computes all decodes in one padded batch, and each chunk separately."""

    name = "torch"

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._slopes: Tensor | None = None

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
        # A chunk sees its own tokens as later steps do, so that cuts of a prompt and replays change nothing.
        keys, values = pair_as_stored(keys, values, layer_cache.dtype)
        keys = keys if len(layer_cache) > 1 else values
        self.write(keys, values, layer_cache, metadata.slot_mapping)
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if metadata.num_decodes:
            out[: metadata.num_decodes] = self._attend_decodes(queries, layer_cache, window, metadata, sinks)
        for chunk in metadata.chunks:
            rows = slice(chunk.query_start, chunk.query_end)
            qkv = (queries[rows], keys[rows], values[rows])
            out[rows] = self._attend_chunk(qkv, layer_cache, window, chunk, metadata, sinks)
        return out

    def attend_whole(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        distance: Tensor,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention without a cache -> [num_queries, num_heads, head_dim]. `distance` [queries, keys] is that from
        query to key; keys at a distance below 0 are hidden.
        """
        mask = self._mask(distance, window, queries.dtype).transpose(0, 1)
        queries, keys, values = (rows.transpose(0, 1)[None] for rows in (queries, keys, values))
        return self._weigh(queries, keys, values, mask, sinks)[0].transpose(0, 1)

    def _attend_decodes(
        self,
        queries: Tensor,
        layer_cache: Tensor,
        window: int | None,
        metadata: ForwardMetadata,
        sinks: Tensor | None,
    ) -> Tensor:
        # -> [num_decodes, num_heads, head_dim]
        num_decodes, block_size = metadata.num_decodes, layer_cache.shape[2]
        num_blocks = -(-metadata.max_decode_context // block_size)
        tables = metadata.block_tables[:num_decodes, :num_blocks]
        # [num_decodes, num_blocks, block_size, num_kv_heads, head_dim] -> [num_decodes, num_kv_heads, keys, head_dim]
        gathered = (as_bytes(layer_cache)[plane][tables].view(layer_cache.dtype) for plane in (0, -1))
        keys, values = (heads.flatten(1, 2).transpose(1, 2).to(queries.dtype) for heads in gathered)
        mask = self._decode_mask(metadata, keys.shape[2], window, queries.dtype)
        return self._weigh(queries[:num_decodes, :, None], keys, values, mask, sinks)[:, :, 0]

    def _attend_chunk(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        layer_cache: Tensor,
        window: int | None,
        chunk: Chunk,
        metadata: ForwardMetadata,
        sinks: Tensor | None,
    ) -> Tensor:
        """Causal attention of one chunk -> [num_queries, num_heads, head_dim]; `qkv`: its queries, keys, values."""
        # [1, heads, num_queries, head_dim]
        queries, keys, values = (heads.transpose(0, 1)[None].to(qkv[0].dtype) for heads in qkv)
        sees_all = chunk.first_position == 0 and (window is None or window >= chunk.context_len)
        if sees_all and self._shape.is_plain:
            return self._weigh(queries, keys, values, None)[0].transpose(0, 1)
        first_key = 0
        if chunk.first_position > 0:
            keys, values, first_key = _gather(layer_cache, window, chunk, metadata)
            keys, values = keys[None].to(queries.dtype), values[None].to(queries.dtype)
        tile = max(1, MAX_MASK_ELEMENTS // (keys.shape[2] * (1 if self._shape.is_plain else self._shape.num_heads)))
        outs = []
        for start in range(0, chunk.num_queries, tile):
            stop = min(start + tile, chunk.num_queries)
            num_keys = chunk.first_position + stop - first_key
            mask = self._chunk_mask(metadata, chunk, range(start, stop), first_key, window, queries)
            part = self._weigh(queries[:, :, start:stop], keys[:, :, :num_keys], values[:, :, :num_keys], mask, sinks)
            outs.append(part[0].transpose(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _weigh(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Softmax attention over [batch, heads, tokens, head_dim] tensors; causal if `mask` is None. Sinks need one."""
        shape = self._shape
        if mask is not None and sinks is not None:
            keys, values, mask = _with_sinks(keys, values, mask, sinks)
        if mask is None or shape.softcap is None:
            return scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=shape.scale,
                enable_gqa=shape.queries_per_kv_head > 1,
            )
        keys, values = (heads.repeat_interleave(shape.queries_per_kv_head, 1) for heads in (keys, values))
        scores = torch.tanh(queries @ keys.transpose(2, 3) * (shape.scale / shape.softcap)) * shape.softcap
        return (scores + mask).softmax(-1, dtype=torch.float32).to(values.dtype) @ values

    def _decode_mask(self, metadata: ForwardMetadata, num_keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [num_decodes, 1 or num_heads, 1, num_keys], cached in the metadata."""
        cache_key = ("decode", window)
        if cache_key not in metadata.masks:
            lens = metadata.context_lens[: metadata.num_decodes, None]
            distance = lens - 1 - torch.arange(num_keys, device=lens.device)
            metadata.masks[cache_key] = self._mask(distance, window, dtype)[:, :, None]
        return metadata.masks[cache_key]

    def _chunk_mask(
        self,
        metadata: ForwardMetadata,
        chunk: Chunk,
        tile: range,
        first_key: int,
        window: int | None,
        like: Tensor,
    ) -> Tensor:
        """Additive mask [1 or num_heads, queries, keys] of a tile of a chunk's queries and keys from `first_key` on.
        Cached in the metadata if the tile covers the chunk.
        """
        start, stop, is_complete = tile.start, tile.stop, len(tile) == chunk.num_queries
        cache_key = ("chunk", chunk.row, window)
        if is_complete and cache_key in metadata.masks:
            return metadata.masks[cache_key]
        query_positions = torch.arange(chunk.first_position + start, chunk.first_position + stop, device=like.device)
        key_positions = torch.arange(first_key, chunk.first_position + stop, device=like.device)
        mask = self._mask(query_positions[:, None] - key_positions, window, like.dtype).transpose(0, 1)
        if is_complete:
            metadata.masks[cache_key] = mask
        return mask

    def _mask(self, distance: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [queries, 1 or num_heads, keys] for distances [queries, keys] from query to key."""
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        mask = torch.zeros(distance.shape, dtype=dtype, device=distance.device)[:, None]
        if self._shape.alibi is not None:
            if self._slopes is None:  # once: a step that is captured must not make it of numbers
                self._slopes = torch.tensor(self._shape.alibi, device=distance.device)
            mask = (-self._slopes[:, None] * distance[:, None]).to(dtype)
        return mask.masked_fill(hidden[:, None], float("-inf"))


def _with_sinks(keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With one more key and value, which are 0; `mask` [.., 1 or num_heads, queries, keys] has the sinks for it."""
    keys, values = (pad(heads, (0, 0, 0, 1)) for heads in (keys, values))
    mask = mask.expand(*mask.shape[:-3], len(sinks), *mask.shape[-2:])
    scores = sinks.to(mask.dtype)[:, None, None].expand(*mask.shape[:-1], 1)
    return keys, values, torch.cat((mask, scores), -1)


def _gather(
    layer_cache: Tensor, window: int | None, chunk: Chunk, metadata: ForwardMetadata
) -> tuple[Tensor, Tensor, int]:
    """Keys and values [num_kv_heads, num_keys, head_dim] visible to the chunk, and the position of the first key."""
    block_size = layer_cache.shape[2]
    first_block = 0 if window is None else max(0, chunk.first_position - window + 1) // block_size
    end_block = -(-chunk.context_len // block_size)
    first_key = first_block * block_size
    table = metadata.block_tables[chunk.row, first_block:end_block]
    # [planes, num_blocks, block_size, num_kv_heads, head_dim] -> [planes, num_keys, num_kv_heads, head_dim]
    blocks = as_bytes(layer_cache).index_select(1, table).view(layer_cache.dtype)
    context = blocks.flatten(1, 2)[:, : chunk.context_len - first_key]
    return context[0].transpose(0, 1), context[-1].transpose(0, 1), first_key
