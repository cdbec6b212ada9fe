"""A step of an encoder-decoder model: what the encoder reads, what the decoder, and who attends to what.

Tokens of a step are the flattened parts of sequences, as for other models (`engine/batch_inputs.py`). Positions below
`num_encoded` of a sequence, the prompt's, are the encoder's: a step has all of them or none. The others are the
decoder's: the start token, and what was generated.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.attention.metadata import ForwardMetadata


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence's tokens in a step: rows `[start, end)` of the step's tokens, of which the encoder reads the first
    `num_encoding`. Of its `context_len` tokens `num_encoded` are the prompt; `index` is its row in the block tables."""

    index: int
    start: int
    end: int
    num_encoding: int
    num_encoded: int
    context_len: int

    @property
    def num_decoding(self) -> int:
        """Tokens for the decoder."""
        return self.end - self.start - self.num_encoding


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Sequences with equally many decoder tokens that attend together.

    `rows` [num_seqs, num_queries] of the decoder's tokens; `queries` [num_seqs, num_queries] and `keys` [num_seqs,
    num_keys] are positions behind the prompt, `slots` [num_seqs, num_keys] where the keys are in the cache. Keys beyond
    a sequence's last token repeat it; no query may see them.
    """

    rows: Tensor
    queries: Tensor
    keys: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """`encoder_rows`, `decoder_rows`: of the step's tokens. `lengths`: of the prompts that the encoder reads, in order.
    `cross`: every decoder token as a sequence of its own, whose context is the prompt; its slots are the prompts'."""

    encoder_rows: Tensor
    decoder_rows: Tensor
    lengths: tuple[int, ...]
    decoder_slots: Tensor
    groups: tuple[SelfAttention, ...]
    cross: ForwardMetadata


def plan_step(metadata: ForwardMetadata, block_size: int) -> Step:
    """Take a step's tokens apart. On CUDA it waits for the device once."""
    parts = _parts(metadata)
    device = metadata.positions.device
    encoder_rows = _rows([(part.start, part.start + part.num_encoding) for part in parts], device)
    decoder_rows = _rows([(part.start + part.num_encoding, part.end) for part in parts], device)
    return Step(
        encoder_rows=encoder_rows,
        decoder_rows=decoder_rows,
        lengths=tuple(part.num_encoding for part in parts if part.num_encoding),
        decoder_slots=metadata.slot_mapping[decoder_rows],
        groups=tuple(_groups(parts, metadata, block_size)),
        cross=_cross(parts, metadata, metadata.slot_mapping[encoder_rows]),
    )


def _parts(metadata: ForwardMetadata) -> list[Part]:
    columns = torch.stack((metadata.context_lens, metadata.prompt_lens)).tolist()
    bounds = pairwise(metadata.query_starts.tolist())
    parts = []
    for index, ((start, end), context_len, prompt_len) in enumerate(zip(bounds, *columns, strict=True)):
        num_encoded = prompt_len - 1  # the decoder's start token counts as the prompt's last
        first_position = context_len - (end - start)
        num_encoding = max(0, num_encoded - first_position)
        if num_encoding not in (0, num_encoded) or end - start <= num_encoding:
            raise ValueError("an encoder's prompt must be computed in one step, with the decoder's first token")
        parts.append(Part(index, start, end, num_encoding, num_encoded, context_len))
    return parts


def _rows(spans: list[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(*span, device=device) for span in spans])


def _groups(parts: list[Part], metadata: ForwardMetadata, block_size: int) -> list[SelfAttention]:
    """Single tokens together, each longer part by itself."""
    firsts, num_rows = [], 0
    for part in parts:
        firsts.append(num_rows)
        num_rows += part.num_decoding
    placed = list(zip(parts, firsts, strict=True))
    single = [(part, first) for part, first in placed if part.num_decoding == 1]
    longer = [[(part, first)] for part, first in placed if part.num_decoding > 1]
    return [_group(group, metadata, block_size) for group in ([single] if single else []) + longer]


def _group(placed: list[tuple[Part, int]], metadata: ForwardMetadata, block_size: int) -> SelfAttention:
    parts, firsts = zip(*placed, strict=True)
    device, num_queries = metadata.positions.device, parts[0].num_decoding
    encoded = torch.tensor([part.num_encoded for part in parts], device=device)[:, None]
    lens = torch.tensor([part.context_len for part in parts], device=device)[:, None] - encoded
    within = torch.arange(num_queries, device=device)
    keys = torch.arange(int(max(part.context_len - part.num_encoded for part in parts)), device=device)
    positions = encoded + torch.minimum(keys, lens - 1)  # in the sequence
    tables = metadata.block_tables[torch.tensor([part.index for part in parts], device=device)].long()
    slots = tables.gather(1, positions // block_size) * block_size + positions % block_size
    return SelfAttention(
        rows=torch.tensor(firsts, device=device)[:, None] + within,
        queries=lens - num_queries + within,
        keys=keys.expand(len(parts), -1),
        slots=slots,
    )


def _cross(parts: list[Part], metadata: ForwardMetadata, encoder_slots: Tensor) -> ForwardMetadata:
    device = metadata.positions.device
    counts = torch.tensor([part.num_decoding for part in parts])
    owners = torch.repeat_interleave(torch.arange(len(parts)), counts).to(device)
    encoded = metadata.prompt_lens - 1
    num_rows = int(counts.sum())
    none = torch.zeros(num_rows, dtype=torch.int64, device=device)
    return ForwardMetadata(
        positions=none,
        rope_lengths=none,
        slot_mapping=encoder_slots,
        block_tables=metadata.block_tables[owners],
        context_lens=encoded[owners],
        prompt_lens=none.to(torch.int32),  # all is attended to as generated tokens attend to what is before them
        query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        num_decodes=num_rows,
        chunks=(),
        max_decode_context=max(part.num_encoded for part in parts),
    )
