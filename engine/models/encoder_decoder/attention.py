"""Attention with relative position bias: the encoder's over whole prompts, the decoder's over its own tokens.

Cross-attention has no bias; any attention backend does it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.kv_cache import read_slots
from engine.models.encoder_decoder.position_bias import PositionBias
from engine.models.encoder_decoder.step import SelfAttention

# A bias of one tile of queries has at most so many elements (64 MiB in fp32).
_MAX_BIAS_ELEMENTS = 2**24


def attend_prompts(qkv: Tensor, lengths: Sequence[int], bias: PositionBias) -> Tensor:
    """Every token of a prompt sees all of it. qkv: [3, num_heads, num_tokens, head_dim], prompts of `lengths` one
    after another -> [num_tokens, num_heads, head_dim].
    """
    outs = []
    for prompt in torch.split(qkv, list(lengths), 2):
        queries, keys, values = prompt[:, None]
        positions = torch.arange(keys.shape[2], device=keys.device)
        tile = max(1, _MAX_BIAS_ELEMENTS // (keys.shape[1] * keys.shape[2]))
        for part, rows in zip(torch.split(queries, tile, 2), torch.split(positions, tile), strict=True):
            mask = bias(rows, positions)
            out = scaled_dot_product_attention(part, keys, values, attn_mask=mask, scale=1.0)
            outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def causal_bias(group: SelfAttention, bias: PositionBias) -> Tensor:
    """[num_seqs, num_heads, num_queries, num_keys]: minus infinity where a key comes after the query."""
    biases = bias(group.queries, group.keys).transpose(0, 1)
    hidden = group.keys[:, None, :] > group.queries[:, :, None]
    return biases.masked_fill(hidden[:, None], float("-inf"))


def attend_own(queries: Tensor, layer_cache: Tensor, group: SelfAttention, mask: Tensor) -> Tensor:
    """The decoder's tokens see those before them. queries: [num_tokens, num_heads, head_dim], of which the group's are
    taken; `mask`: its `causal_bias` -> [num_seqs, num_queries, num_heads, head_dim].
    """
    # [num_seqs, num_keys, num_heads, head_dim] -> [num_seqs, num_heads, num_keys, head_dim]
    keys, values = (part.to(queries.dtype).transpose(1, 2) for part in read_slots(layer_cache, group.slots))
    own = queries[group.rows].transpose(1, 2)
    return scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=1.0).transpose(1, 2)
