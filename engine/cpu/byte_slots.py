"""Tokens of a KV cache in int8 (`byte_vectors.py`) for torch."""

import torch
from torch import Tensor

from engine.cpu.vectors import KEYS
from mesh.domain.kv import SCALE_BYTES

_GROUP = 4


def read_byte_slots(layer_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer at these slots, as fp32 [*slots.shape, num_kv_heads, head_dim] each.

    layer_cache: int8 [2, num_blocks, block_size, num_kv_heads, head_dim + 4].
    """
    dim, heads = layer_cache.shape[-1] - SCALE_BYTES, layer_cache.shape[3]
    parts = layer_cache.view(2, -1, heads, KEYS * layer_cache.shape[4])
    keys = parts[0, :, :, : KEYS * dim].view(-1, heads, dim // _GROUP, KEYS, _GROUP)
    values = parts[1, :, :, : KEYS * dim].view(-1, heads, KEYS // _GROUP, dim, _GROUP)
    part, token = slots // KEYS, slots % KEYS
    scales = parts.view(torch.float32)[..., -KEYS:][:, part, :, token]  # [*slots.shape, 2, num_kv_heads]
    key_rows = keys[part, :, :, token].flatten(-2)
    value_rows = values[part, :, token // _GROUP, :, token % _GROUP]
    return key_rows * scales[..., 0, :, None], value_rows * scales[..., 1, :, None]
