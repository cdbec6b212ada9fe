"""How a layer sees the sequences of a step and the blocks of its KV, where it does not see them as other layers do."""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from engine.attention.backend import AttentionShape, ForwardMetadata
from engine.models.model_config import ModelConfig


class View(NamedTuple):
    """The layer's KV is in part `part` of `num_parts` of each block, in this layer of the cache."""

    layer: int
    part: int = 0
    num_parts: int = 1


def view_of_layer(config: ModelConfig, layer: int) -> View:
    """The view of a layer."""
    if config.mixed is None:
        return View(config.num_kv_layers_before(layer))
    return View(*config.mixed.place(layer))


def seen_by(metadata: ForwardMetadata, view: View, block_size: int) -> ForwardMetadata:
    """The step as layers with this view see it: part p of block b is block `b * num_parts + p`."""
    if view.num_parts == 1:
        return metadata
    slots, tables = metadata.slot_mapping, metadata.block_tables
    blocks = slots // block_size * view.num_parts + view.part
    return replace(
        metadata,
        slot_mapping=blocks * block_size + slots % block_size,
        block_tables=tables * view.num_parts + view.part,
        masks={},
    )


def parts_of(layer_cache: Tensor, num_parts: int, shape: AttentionShape) -> Tensor:
    """A layer of the cache [2, num_blocks, block_size, ..] as blocks of parts, of heads of this shape:
    [2, num_blocks * num_parts, block_size, num_kv_heads, elements of a row].
    """
    _, num_blocks, block_size, *_ = layer_cache.shape
    return layer_cache.view(2, num_blocks * num_parts, block_size, shape.num_kv_heads, -1)
