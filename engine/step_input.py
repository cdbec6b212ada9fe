"""StepInput: one engine step as plain arrays: the tokens to compute, the slots of their KV, and the rows to sample.

A StepInput refers to no sequence and holds no tensor. It is built once per step, into buffers that are reused. The
other ranks of a worker get ForwardMetadata, made from it, through memory (engine/ranks/shared.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from engine.attention.backend import AdapterRows, ForwardMetadata, PassStates, chunks_of
from engine.batch import ScheduledBatch, ScheduledSequence
from engine.device_copies import DeviceCopies
from mesh.domain.kv_groups import NO_BLOCK, KVGroups

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step. Arrays are views of the builder's buffers: valid until its next build.

    The tokens of all sequences are concatenated: sequence i has rows `[query_starts[i], query_starts[i + 1])`. The
    first `num_decodes` sequences compute a single token.
    """

    num_decodes: int
    token_ids: Int64s  # [num_tokens]
    positions: Int64s  # [num_tokens]
    rope_lengths: Int64s  # [num_tokens]; see engine/models/rope.py
    slot_mapping: Int64s  # [num_tokens * num_groups]: block_id * block_size + offset of the token's KV in each group
    block_tables: Int32s  # [num_seqs, num_groups * max_blocks] of KV; see StepInputBuilder for the padding
    context_lens: Int32s  # [num_seqs]: tokens of each sequence, this step's included
    prompt_lens: Int32s  # [num_seqs]: tokens of the prompt, with the decoder's start tokens
    query_starts: Int32s  # [num_seqs + 1]
    sample_rows: Int64s  # [num_sampled]: rows whose logits are sampled
    copies: tuple[tuple[int, int], ...]  # blocks to copy (source, target) before the forward pass
    adapters: tuple[AdapterRows, ...] = ()
    state_tables: Int32s | None = None  # [num_seqs, state_blocks], see PassStates
    num_repeated: tuple[int, ...] = ()
    num_groups: int = 1  # of layers, see KVGroups
    reads_all: bool = False  # the results of all rows are read, not only those of sample_rows

    def on_device(self, copies: DeviceCopies) -> "StepTensors":
        """The step on the model's device, by one copy. On CPU the tensors share the arrays' memory."""
        bounds, context_lens = self.query_starts.tolist(), self.context_lens.tolist()
        arrays = {name: getattr(self, name) for name in _ON_DEVICE}
        tensors = copies.to_device(arrays if self.state_tables is None else arrays | {"states": self.state_tables})
        metadata = ForwardMetadata(
            positions=tensors["positions"],
            rope_lengths=tensors["rope_lengths"],
            slot_mapping=tensors["slot_mapping"],
            block_tables=tensors["block_tables"],
            context_lens=tensors["context_lens"],
            prompt_lens=tensors["prompt_lens"],
            query_starts=tensors["query_starts"],
            num_decodes=self.num_decodes,
            chunks=chunks_of(bounds, context_lens, self.num_decodes),
            max_decode_context=max(context_lens[: self.num_decodes], default=0),
            adapters=self.adapters,
            states=PassStates(tensors["states"], self.num_repeated) if "states" in tensors else None,
            num_groups=self.num_groups,
            result_rows=None if self.reads_all else tensors["sample_rows"],
        )
        return StepTensors(tensors["token_ids"], tensors["sample_rows"], metadata)


_ON_DEVICE = (
    *("token_ids", "positions", "rope_lengths", "slot_mapping", "sample_rows"),
    *("block_tables", "context_lens", "prompt_lens", "query_starts"),
)


class StepTensors(NamedTuple):
    """A StepInput on the model's device. Valid as long as its copies are."""

    token_ids: Tensor
    sample_rows: Tensor
    metadata: ForwardMetadata


class StepInputBuilder:
    """Builds a StepInput per step, in buffers that grow as needed. `adapters`: the slots of the model's adapters, by
    digest; they may change between steps.

    Block tables are padded with block 0, which is valid to read but never used. With `state_blocks` any other block
    than those with the step's tokens might hold a state, whose bytes are no KV: tables end with the block of the step's
    last token, and are padded with that. The tables of the groups of layers are side by side; those of groups with one
    of the `windows` begin with padding, up to what the step's tokens see.
    """

    def __init__(
        self,
        block_size: int,
        adapters: Mapping[str, int] = MappingProxyType({}),
        state_blocks: int = 0,
        windows: tuple[int, ...] = (),
        windows_are_chunks: bool = False,
    ) -> None:
        self._groups = KVGroups(block_size, windows or (0,), windows_are_chunks)
        self._state_blocks = state_blocks
        self._adapters = adapters
        self._buffers: dict[str, NDArray[Any]] = {}

    def build(self, batch: ScheduledBatch) -> StepInput:
        """Flatten a batch. The block table of every item must already cover its last token."""
        items, num_decodes = batch.items, batch.num_decodes
        prompt_lens = [item.sequence.num_prompt_tokens for item in items]
        starts = [0, *accumulate(item.num_tokens for item in items)]
        block_tables = self._block_tables(batch)
        positions = self._buffer("positions", (starts[-1],), np.int64)
        rope_lengths = self._buffer("rope_lengths", (starts[-1],), np.int64)
        slots = self._buffer("slot_mapping", (starts[-1] * self._groups.count,), np.int64)
        # Lists, as each operation on an array takes as long as tens of numbers.
        decodes = items[:num_decodes]
        positions[:num_decodes] = [item.start for item in decodes]
        rope_lengths[:num_decodes] = [max(item.end, length) for item, length in zip(decodes, prompt_lens, strict=False)]
        slots[: num_decodes * self._groups.count] = [slot for item in decodes for slot in self._slots_of(item)]
        for row in range(num_decodes, len(items)):
            item, own = items[row], slice(starts[row], starts[row + 1])
            positions[own] = np.arange(item.start, item.end)
            np.maximum(positions[own] + 1, prompt_lens[row], out=rope_lengths[own])
            blocks, offsets = np.divmod(positions[own], self._groups.block_size)
            table = block_tables[row].reshape(self._groups.count, -1)
            slots.reshape(-1, self._groups.count)[own] = (table[:, blocks] * self._groups.block_size + offsets).T
        return StepInput(
            num_decodes=num_decodes,
            token_ids=self._filled("token_ids", [token for item in items for token in item.token_ids()], np.int64),
            positions=positions,
            rope_lengths=rope_lengths,
            slot_mapping=slots,
            block_tables=block_tables,
            context_lens=self._filled("context_lens", [item.end for item in items], np.int32),
            prompt_lens=self._filled("prompt_lens", prompt_lens, np.int32),
            query_starts=self._filled("query_starts", starts, np.int32),
            sample_rows=self._filled("sample_rows", _sample_rows(batch, starts), np.int64),
            copies=batch.copies,
            adapters=self._adapter_rows(batch, starts) if self._adapters else (),
            state_tables=self._state_tables(batch) if self._state_blocks else None,
            num_repeated=tuple(item.num_repeated for item in items),
            num_groups=self._groups.count,
            reads_all=any(item.sequence.spec.prompt_logprobs for item in items),
        )

    def _slots_of(self, decode: ScheduledSequence) -> list[int]:
        """The slot of its token in each group."""
        size, count = self._groups.block_size, self._groups.count
        block, offset = divmod(decode.start, size)
        first = self._state_blocks + block * count
        return [number * size + offset for number in decode.sequence.block_table[first : first + count]]

    def _adapter_rows(self, batch: ScheduledBatch, query_starts: Sequence[int]) -> tuple[AdapterRows, ...]:
        """One entry for neighbours with the same adapter; the scheduler makes them neighbours."""
        rows: list[AdapterRows] = []
        for item, (first, end) in zip(batch.items, pairwise(query_starts), strict=True):
            if not item.sequence.spec.adapter:
                continue
            slot = self._adapters[item.sequence.spec.adapter]
            if rows and (rows[-1].slot, rows[-1].end) == (slot, first):
                first = rows.pop().first
            rows.append(AdapterRows(slot, first, end))
        return tuple(rows)

    def _block_tables(self, batch: ScheduledBatch) -> Int32s:
        groups, count, states = self._groups, self._groups.count, self._state_blocks
        tables = [self._table_of(item) for item in batch.items]
        longest = (max(map(len, tables), default=states) - states) // count
        blocks: list[int] = []
        for item, table in zip(batch.items, tables, strict=True):
            padding = [table[-1] if states else 0] * (longest - (len(table) - states) // count)
            for group in range(count):
                first = groups.first_visible(group, item.start)
                blocks += [NO_BLOCK] * first
                blocks += table[states + first * count + group :: count]
                blocks += padding
        return self._filled("block_tables", blocks, np.int32).reshape(len(tables), count * longest)

    def _table_of(self, item: ScheduledSequence) -> list[int]:
        table, states = item.sequence.block_table, self._state_blocks
        return table[: states + self._groups.num_positions(item.end) * self._groups.count] if states else table

    def _state_tables(self, batch: ScheduledBatch) -> Int32s:
        tables = self._buffer("states", (len(batch.items), self._state_blocks), np.int32)
        for row, item in enumerate(batch.items):
            tables[row] = item.sequence.block_table[: self._state_blocks]
        return tables

    def _filled(self, name: str, values: Any, dtype: DTypeLike) -> NDArray[Any]:
        array = self._buffer(name, (len(values),), dtype)
        array[:] = values
        return array

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A view of this shape on the named buffer, which grows if it is too small."""
        size = math.prod(shape)
        if name not in self._buffers or len(self._buffers[name]) < size:
            self._buffers[name] = np.empty(2 * size, dtype)
        return self._buffers[name][:size].reshape(shape)


def _sample_rows(batch: ScheduledBatch, query_starts: Sequence[int]) -> list[int]:
    """The row of the last known token, and the rows of the drafts, of each item that needs sampling."""
    rows: list[int] = []
    for item, stop in zip(batch.items, query_starts[1:], strict=True):
        if item.needs_sampling:
            rows += range(stop - 1 - len(item.drafts), stop)
    return rows
