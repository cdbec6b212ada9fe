"""Step: the tokens of an encoder-decoder model's step, and their self-attention with relative position bias.

The tokens of a step are flattened sequences, as for other models (`engine/step_input.py`). In each sequence, the first
`num_encoded` positions, the prompt, belong to the encoder: a step computes all of them or none. The other positions,
the start token and the generated tokens, belong to the decoder. The encoder attends over complete prompts, the decoder
over its own tokens. Cross-attention has no bias, so it uses an attention backend.

The bias is a learned value per head and bucket of distances, added to the score of a key. In each direction, half of
the buckets hold one distance each. The other half covers longer distances on a logarithmic scale; the last bucket holds
all distances from `max_distance` on. (Raffel et al. 2020, §2.1)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.backend import ForwardMetadata
from engine.kv.cache import read_slots


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """The tokens of one sequence in a step: rows `[start, stop)` of the step's tokens.

    The encoder computes the first `num_encoding` of them. The first `num_encoded` of the sequence's `context_len`
    tokens are the prompt. `index` is the sequence's row in the block tables.
    """

    index: int
    start: int
    stop: int
    num_encoding: int
    num_encoded: int
    context_len: int

    @property
    def num_decoding(self) -> int:
        return self.stop - self.start - self.num_encoding


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """A group of sequences with the same number of decoder tokens, whose self-attention is computed together.

    `rows` [num_seqs, num_queries]: rows of the decoder's tokens. `queries` [num_seqs, num_queries] and `keys`
    [num_seqs, num_keys]: positions relative to the end of the prompt. `slots` [num_seqs, num_keys]: cache slots of
    the keys. Keys beyond a sequence's last token repeat its slot and must be masked.
    """

    rows: Tensor
    queries: Tensor
    keys: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """The plan of one step.

    `encoder_rows`, `decoder_rows`: rows of the step's tokens. `lengths`: lengths of the prompts to encode, in order.
    `cross`: metadata of cross-attention, in which every decoder token is a sequence whose context is the prompt; its
    slots are those of the encoded prompts.
    """

    encoder_rows: Tensor
    decoder_rows: Tensor
    lengths: tuple[int, ...]
    decoder_slots: Tensor
    groups: tuple[SelfAttention, ...]
    cross: ForwardMetadata


def plan_step(metadata: ForwardMetadata, block_size: int) -> Step:
    """Split the step's tokens between encoder and decoder. On CUDA the host waits for it several times."""
    sequences = _sequences(metadata)
    device = metadata.positions.device
    encoder_rows = _rows([(sequence.start, sequence.start + sequence.num_encoding) for sequence in sequences], device)
    decoder_rows = _rows([(sequence.start + sequence.num_encoding, sequence.stop) for sequence in sequences], device)
    return Step(
        encoder_rows=encoder_rows,
        decoder_rows=decoder_rows,
        lengths=tuple(sequence.num_encoding for sequence in sequences if sequence.num_encoding),
        decoder_slots=metadata.slot_mapping[decoder_rows],
        groups=tuple(_groups(sequences, metadata, block_size)),
        cross=_cross(sequences, metadata, metadata.slot_mapping[encoder_rows]),
    )


def _sequences(metadata: ForwardMetadata) -> list[SequenceTokens]:
    columns = torch.stack((metadata.context_lens, metadata.prompt_lens)).tolist()
    bounds = pairwise(metadata.query_starts.tolist())
    sequences = []
    for index, ((start, stop), context_len, prompt_len) in enumerate(zip(bounds, *columns, strict=True)):
        num_encoded = prompt_len - 1  # the decoder's start token counts as the prompt's last
        first_position = context_len - (stop - start)
        num_encoding = max(0, num_encoded - first_position)
        if num_encoding not in (0, num_encoded) or stop - start <= num_encoding:
            raise ValueError("an encoder's prompt must be computed in one step, with the decoder's first token")
        sequences.append(SequenceTokens(index, start, stop, num_encoding, num_encoded, context_len))
    return sequences


def _rows(spans: list[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(*span, device=device) for span in spans])


def _groups(sequences: list[SequenceTokens], metadata: ForwardMetadata, block_size: int) -> list[SelfAttention]:
    """One group for all sequences with a single decoder token, and one for each sequence with more."""
    firsts, num_rows = [], 0
    for sequence in sequences:
        firsts.append(num_rows)
        num_rows += sequence.num_decoding
    placed = list(zip(sequences, firsts, strict=True))
    single = [(sequence, first) for sequence, first in placed if sequence.num_decoding == 1]
    longer = [[(sequence, first)] for sequence, first in placed if sequence.num_decoding > 1]
    return [_group(group, metadata, block_size) for group in ([single] if single else []) + longer]


def _group(placed: list[tuple[SequenceTokens, int]], metadata: ForwardMetadata, block_size: int) -> SelfAttention:
    sequences, firsts = zip(*placed, strict=True)
    device, num_queries = metadata.positions.device, sequences[0].num_decoding
    encoded = torch.tensor([sequence.num_encoded for sequence in sequences], device=device)[:, None]
    lens = torch.tensor([sequence.context_len for sequence in sequences], device=device)[:, None] - encoded
    within = torch.arange(num_queries, device=device)
    keys = torch.arange(int(max(sequence.context_len - sequence.num_encoded for sequence in sequences)), device=device)
    positions = encoded + torch.minimum(keys, lens - 1)  # in the sequence
    tables = metadata.block_tables[torch.tensor([sequence.index for sequence in sequences], device=device)].long()
    slots = tables.gather(1, positions // block_size) * block_size + positions % block_size
    return SelfAttention(
        rows=torch.tensor(firsts, device=device)[:, None] + within,
        queries=lens - num_queries + within,
        keys=keys.expand(len(sequences), -1),
        slots=slots,
    )


def _cross(sequences: list[SequenceTokens], metadata: ForwardMetadata, encoder_slots: Tensor) -> ForwardMetadata:
    device = metadata.positions.device
    counts = torch.tensor([sequence.num_decoding for sequence in sequences])
    owners = torch.repeat_interleave(torch.arange(len(sequences)), counts).to(device)
    encoded = metadata.prompt_lens - 1
    num_rows = int(counts.sum())
    none = torch.zeros(num_rows, dtype=torch.int64, device=device)
    return ForwardMetadata(
        positions=none,
        rope_lengths=none,
        slot_mapping=encoder_slots,
        block_tables=metadata.block_tables[owners],
        context_lens=encoded[owners],
        prompt_lens=none.to(torch.int32),  # no prompt: every query attends to its complete context
        query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        num_decodes=num_rows,
        chunks=(),
        max_decode_context=max(sequence.num_encoded for sequence in sequences),
    )


class PositionBias:
    """Position biases of the encoder or the decoder, shared by its layers. `weight`: [num_buckets, num_heads]."""

    def __init__(self, weight: Tensor, max_distance: int, *, both_directions: bool) -> None:
        distances = torch.arange(-max_distance, max_distance + 1)
        buckets = _bucket(distances, weight.shape[0], max_distance, both_directions=both_directions)
        self._max_distance = max_distance
        self._by_distance = weight[buckets.to(weight.device)].T.contiguous()  # [num_heads, 2 * max_distance + 1]

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions [.., num_queries] and [.., num_keys] -> biases [num_heads, .., num_queries, num_keys]."""
        distances = keys[..., None, :] - queries[..., :, None]
        limit = self._max_distance
        return self._by_distance[:, distances.clamp_(-limit, limit).add_(limit)]


def _bucket(distances: Tensor, num_buckets: int, max_distance: int, *, both_directions: bool) -> Tensor:
    """Buckets of distances (key minus query). With one direction only, keys after the query get the bucket of 0."""
    buckets = torch.zeros_like(distances)
    if both_directions:
        num_buckets //= 2
        buckets += (distances > 0) * num_buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    num_exact = num_buckets // 2
    # In fp32, and in this order, to round exactly as transformers does.
    ratio = torch.log(distances.float() / num_exact) / math.log(max_distance / num_exact)
    far = (num_exact + (ratio * (num_buckets - num_exact)).to(torch.long)).clamp(max=num_buckets - 1)
    return buckets + torch.where(distances < num_exact, distances, far)


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
