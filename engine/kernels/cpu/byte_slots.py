"""Reads tokens of a KV cache in int8 (laid out as in `byte_vectors.py`) with torch."""

import torch
from torch import Tensor

from engine.kernels.cpu.constants import GROUP, KEYS
from mesh.domain.kv import SCALE_BYTES


def read_byte_slots(layer_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer at these slots; two fp32 tensors [*slots.shape, num_kv_heads, head_dim].

    layer_cache: int8 [2, num_blocks, block_size, num_kv_heads, head_dim + 4].
    """
    dim, heads = layer_cache.shape[-1] - SCALE_BYTES, layer_cache.shape[3]
    segments = layer_cache.view(2, -1, heads, KEYS * layer_cache.shape[4])
    keys = segments[0, :, :, : KEYS * dim].view(-1, heads, dim // GROUP, KEYS, GROUP)
    values = segments[1, :, :, : KEYS * dim].view(-1, heads, KEYS // GROUP, dim, GROUP)
    segment, token = slots // KEYS, slots % KEYS
    scales = segments.view(torch.float32)[..., -KEYS:][:, segment, :, token]  # [*slots.shape, 2, num_kv_heads]
    key_rows = keys[segment, :, :, token].flatten(-2)
    value_rows = values[segment, :, token // GROUP, :, token % GROUP]
    return key_rows * scales[..., 0, :, None], value_rows * scales[..., 1, :, None]
