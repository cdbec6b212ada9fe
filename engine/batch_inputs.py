"""From a ScheduledBatch to flat tensors: what the decoder reads, built with numpy and sent to the device at once."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.metadata import Chunk, ForwardMetadata
from engine.batch import ScheduledBatch

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """A step's tokens and where each item's lie: rows `[starts[i], starts[i + 1])`."""

    token_ids: Tensor  # [num_tokens] int64
    metadata: ForwardMetadata
    starts: list[int]


def build_inputs(batch: ScheduledBatch, block_size: int, device: torch.device) -> BatchInputs:
    """Flatten a batch. Every item's block table must already reach its last token."""
    items = batch.items
    counts = np.array([item.num_tokens for item in items], np.int64)
    ends = np.array([item.end for item in items], np.int64)
    starts = np.concatenate([[0], counts.cumsum()])
    rows = np.repeat(np.arange(len(items)), counts)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - (ends - counts), counts)
    tables = _block_tables(batch)
    slots = tables[rows, positions // block_size] * block_size + positions % block_size
    prompt_lens = np.array([item.sequence.num_prompt_tokens for item in items], np.int64)
    bounds = starts.tolist()
    num_decodes = batch.num_decodes
    chunks = tuple(
        Chunk(row, start, end - start, items[row].end)
        for row, (start, end) in enumerate(pairwise(bounds))
        if row >= num_decodes
    )
    metadata = ForwardMetadata(
        positions=_send(positions, device),
        rope_lengths=_send(np.maximum(positions + 1, prompt_lens[rows]), device),
        slot_mapping=_send(slots, device),
        block_tables=_send(tables.astype(np.int32), device),
        context_lens=_send(ends.astype(np.int32), device),
        prompt_lens=_send(prompt_lens.astype(np.int32), device),
        query_starts=_send(starts.astype(np.int32), device),
        num_decodes=num_decodes,
        chunks=chunks,
        max_decode_context=int(ends[:num_decodes].max(initial=0)),
    )
    return BatchInputs(_send(_token_ids(batch), device), metadata, bounds)


def _token_ids(batch: ScheduledBatch) -> Ints:
    token_ids: list[int] = []
    for item in batch.items:
        token_ids += item.token_ids()
    return np.array(token_ids, np.int64)


def _block_tables(batch: ScheduledBatch) -> Ints:
    """[num_seqs, max_blocks], padded with block 0, which is valid to read and never looked at."""
    tables = [item.sequence.block_table for item in batch.items]
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), np.int64)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded


def _send(array: NDArray[np.int64] | NDArray[np.int32], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
