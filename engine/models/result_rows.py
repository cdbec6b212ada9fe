"""Result rows: the rows of a step whose hidden states are read, such as the last token of a prompt. The others are
computed for their KV only, so the model drops them after the last layer that writes KV.

A model of 30 layers saves nearly a thirtieth of a prompt, one whose last layers read the KV of earlier ones more.
A row's result is the same, because it does not depend on its batch.
"""

import numpy as np
import torch

from engine.attention.backend import AdapterRows
from engine.kernels.cpu.arguments import Batch, Int64s
from engine.models.blocks import has_attention
from engine.models.model_config import ModelConfig


def last_writing_layer(config: ModelConfig) -> int:
    """The last layer that writes KV or a state."""
    return max(
        layer
        for layer in range(config.num_layers)
        if config.is_recurrent(layer) or (has_attention(config, layer) and config.stores_kv(layer))
    )


def largest_kv(kind: torch.dtype) -> float:
    """The largest key or value that KV of this type can hold. int8 has scales in fp32."""
    return torch.finfo(kind if kind.is_floating_point else torch.float32).max


def batch_of_results(batch: Batch, rows: Int64s) -> Batch:
    """A step of these rows, in which each is a sequence of its own, the last of the tokens that it sees."""
    sequences = np.searchsorted(batch.query_starts, rows, "right") - 1
    rotated = batch.rotations.rows
    num_later = batch.query_starts[sequences + 1] - rows.astype(np.int32)
    return Batch(
        slots=batch.slots[rows],
        segments=batch.segments[sequences],
        context_lens=batch.context_lens[sequences] - num_later + np.int32(1),
        prompt_lens=batch.prompt_lens[sequences],
        query_starts=np.arange(len(rows) + 1, dtype=np.int32),
        rotations=batch.rotations._replace(rows=rotated[rows] if len(rotated) else rotated),
    )


def adapters_of_results(adapters: tuple[AdapterRows, ...], rows: Int64s) -> tuple[AdapterRows, ...]:
    """The adapters of these rows."""
    cut = (AdapterRows(slot, *np.searchsorted(rows, bounds).tolist()) for slot, *bounds in adapters)
    return tuple(each for each in cut if each.first < each.end)
