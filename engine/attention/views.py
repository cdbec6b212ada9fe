"""Views: the sequences of a step and the blocks of KV as a layer sees them, if it attends in chunks or has a part of
each block.

Layers that attend in chunks see each sequence from the chunk of its token on, as if nothing were before it: the tokens
of a prompt that lie in several chunks are several sequences. The compiled loop has windows for them instead.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.backend import AttentionShape, Chunk, ForwardMetadata
from engine.kv.cache import BlockParts
from engine.models.kv_groups import kv_place, num_kv_layers
from engine.models.model_config import ModelConfig


class View(NamedTuple):
    """The layer's KV is in part `part` of `num_parts` of each block of its group, in this layer of the cache. It
    attends in chunks of `chunk` tokens, None: from the first token on.
    """

    layer: int
    part: int = 0
    num_parts: int = 1
    group: int = 0
    chunk: int | None = None


def view_of_layer(config: ModelConfig, layer: int, windows: Sequence[int]) -> View:
    """The view of a layer, with the windows of the cache's groups."""
    chunk = config.windows[layer] if config.windows_are_chunks else None
    return View(*kv_place(config, layer, windows), chunk)


def block_parts(config: ModelConfig, windows: Sequence[int]) -> list[list[BlockParts]]:
    """How layers of the model share each layer of the cache, in the blocks of each group; nothing if none do."""
    if config.per_layer is None:
        return []
    whole = BlockParts(1, config.num_kv_heads, config.head_dim)
    parts = [[whole] * num_kv_layers(config, windows) for _ in windows or (0,)]
    for layer, sizes in enumerate(config.per_layer.layers):
        place = kv_place(config, layer, windows)
        parts[place.group][place.layer] = BlockParts(place.num_parts, sizes.num_kv_heads, sizes.head_dim)
    return parts


def seen_by(metadata: ForwardMetadata, view: View, block_size: int) -> ForwardMetadata:
    """The step as layers with this view see it."""
    if view.chunk is not None and max(metadata.max_decode_context, metadata.max_chunk_context) > view.chunk:
        metadata = _in_chunks(metadata, view.chunk, block_size)
    if view.num_parts > 1:
        metadata = _in_parts(metadata, view, block_size)
    return metadata


def parts_of(layer_cache: Tensor, num_parts: int, shape: AttentionShape) -> Tensor:
    """A layer of the cache [2 or 1, num_blocks, block_size, ..] as blocks of parts, of heads of this shape:
    [.., num_blocks * num_parts, block_size, num_kv_heads, elements of a row].
    """
    planes, num_blocks, block_size, *_ = layer_cache.shape
    return layer_cache.view(planes, num_blocks * num_parts, block_size, shape.num_kv_heads, -1)


def _in_parts(metadata: ForwardMetadata, view: View, block_size: int) -> ForwardMetadata:
    """Part p of block b is block `b * num_parts + p`."""
    slots, tables = metadata.slot_mapping, metadata.block_tables
    blocks = slots // block_size * view.num_parts + view.part
    return replace(
        metadata,
        slot_mapping=blocks * block_size + slots % block_size,
        block_tables=tables * view.num_parts + view.part,
        masks={},
    )


def _in_chunks(metadata: ForwardMetadata, chunk: int, block_size: int) -> ForwardMetadata:
    """The sequences of one query stay in their places, those of a prompt's chunks follow."""
    num_decodes, device = metadata.num_decodes, metadata.block_tables.device
    pieces = [piece for of_prompt in metadata.chunks for piece in _pieces(of_prompt, chunk)]
    rows = torch.tensor([*range(num_decodes), *(piece.row for piece in pieces)], device=device)
    lens = metadata.context_lens[:num_decodes]
    if pieces:
        lens = torch.cat((lens, torch.tensor([piece.context_len for piece in pieces], dtype=lens.dtype, device=device)))
    before = (lens - 1) // chunk * chunk
    places = before[:, None] // block_size + torch.arange(chunk // block_size, device=device)
    last = metadata.block_tables.shape[1] - 1
    starts = [*range(num_decodes), *(piece.query_start for piece in pieces), len(metadata.positions)]
    return replace(
        metadata,
        block_tables=metadata.block_tables[rows].gather(1, places.clamp(max=last)),
        context_lens=lens - before,
        prompt_lens=(metadata.prompt_lens[rows] - before).clamp(min=0),
        query_starts=torch.tensor(starts, dtype=metadata.query_starts.dtype, device=device),
        chunks=tuple(
            replace(piece, row=num_decodes + row, context_len=(piece.context_len - 1) % chunk + 1)
            for row, piece in enumerate(pieces)
        ),
        max_decode_context=min(metadata.max_decode_context, chunk),
        masks={},
    )


def _pieces(prompt: Chunk, size: int) -> list[Chunk]:
    """Cut the queries of a prompt at the ends of attention's chunks of `size` tokens."""
    pieces, first = [], prompt.first_position
    while first < prompt.context_len:
        end = min((first // size + 1) * size, prompt.context_len)
        start = prompt.query_start + first - prompt.first_position
        pieces.append(replace(prompt, query_start=start, num_queries=end - first, context_len=end))
        first = end
    return pieces
