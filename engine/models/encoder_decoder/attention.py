"""Self-attention with relative position bias: the encoder's over complete prompts, the decoder's over its own tokens.

Cross-attention has no bias, so it uses an attention backend.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.kv_cache import read_slots
from engine.models.encoder_decoder.position_bias import PositionBias
from engine.models.encoder_decoder.step import SelfAttention

# Limit on the elements of the bias for a tile of queries (64 MiB in fp32).
_MAX_BIAS_ELEMENTS = 2**24


def attend_prompts(qkv: Tensor, lengths: Sequence[int], bias: PositionBias) -> Tensor:
    """Full attention within each prompt -> [num_tokens, num_heads, head_dim].

    qkv: [3, num_heads, num_tokens, head_dim], with concatenated prompts of these `lengths`.
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
    """Bias [num_seqs, num_heads, num_queries, num_keys], with minus infinity where a key comes after the query."""
    biases = bias(group.queries, group.keys).transpose(0, 1)
    hidden = group.keys[:, None, :] > group.queries[:, :, None]
    return biases.masked_fill(hidden[:, None], float("-inf"))


def attend_own(queries: Tensor, layer_cache: Tensor, group: SelfAttention, mask: Tensor) -> Tensor:
    """Causal self-attention of a group of the decoder's tokens -> [num_seqs, num_queries, num_heads, head_dim].

    queries: [num_tokens, num_heads, head_dim] of all decoder tokens; `mask`: the group's `causal_bias`.
    """
    # [num_seqs, num_keys, num_heads, head_dim] -> [num_seqs, num_heads, num_keys, head_dim]
    keys, values = (part.to(queries.dtype).transpose(1, 2) for part in read_slots(layer_cache, group.slots))
    group_queries = queries[group.rows].transpose(1, 2)
    return scaled_dot_product_attention(group_queries, keys, values, attn_mask=mask, scale=1.0).transpose(1, 2)
