"""A group of ranks on one machine: memory that all of them map, and the commands that begin their work.

The memory has no name (memfd): it is gone when the last rank is. Each stage has the counter of its barrier and
activations there; each step in flight has a slot with its metadata and its residual, which the stages update in turn.
Rank 0 writes embedded tokens and metadata, then sends a command of a few bytes on the socket of each rank of its stage.
The ranks of a stage meet at the barrier within every layer, so when the first of them has finished its layers, none
reads the memory any more, and it sends the command to the next stage. The last stage reports the end to rank 0.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from engine.attention.backend import AdapterRows, ForwardMetadata, chunks_of
from engine.decode_graphs import StepShape
from engine.kernels.cpu.adapters import shrunk_width
from engine.kernels.cpu.arguments import Int64s
from engine.kernels.cpu.buffers import round_up
from engine.kernels.cpu.machine import PANEL, TILE_ROWS
from engine.model import LayerGroups
from engine.models.model_config import ModelConfig
from engine.ranks.commands import CaptureSteps, Command, Forward, Logits, PutAdapter, Report, RunGraph
from engine.runner_settings import RunnerSettings
from engine.step_input import StepInput
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees, Span

_PAGE = 4096
_DEPTH_MULTIPLE = 64
"""The columns of a product's left operand are padded to a multiple of it."""
_OF_SLOT = frozenset({"residual", "token_ids", "positions", "sequences"})  # a step's, whichever stage computes it
_ONCE = frozenset({"output_rows", "logits", "largest", "scores"})  # stage 0 alone computes logits


class StepMemory:
    """The memory that the ranks of a group share: named arrays of fixed sizes. Those of _ONCE exist once, those of
    _OF_SLOT for each slot, the others for each stage; there are as many slots as stages. A page that no
    step has used takes no memory.

    `max_rows` limits the tokens of a step, `max_blocks` the blocks of a sequence in each of `num_groups` groups of
    layers (KVGroups), `adapter_rank` the ranks of LoRA adapters; 0: there are none. `fd`: a file for several processes,
    which grows to the size that is needed; without it the memory is for threads of this process.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_rows: int,
        max_blocks: int,
        num_stages: int = 1,
        num_groups: int = 1,
        adapter_rank: int = 0,
        fd: int | None = None,
    ) -> None:
        self.num_groups = num_groups
        widest = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        rows, vocab = max_rows + 1, round_up(config.vocab_size, PANEL)
        sizes = {
            "counter": (1, np.int64),
            "residual": (rows * config.hidden_size, np.float32),
            "branch": (rows * config.hidden_size, np.float32),
            "inner": (rows * config.intermediate_size, np.float32),
            "gate_up": (rows * 2 * config.intermediate_size, np.float32),
            "attended": (rows * config.num_heads * config.head_dim, np.float32),
            "squares": (rows * (config.num_heads + config.num_kv_heads), np.float32),
            "a": ((max_rows + TILE_ROWS) * round_up(widest, _DEPTH_MULTIPLE) * 4, np.uint8),
            "factors": (rows, np.float32),
            "output_rows": (rows * config.hidden_size, np.float32),
            "logits": (rows * vocab, np.float32),
            "largest": (rows, np.int64),
            "scores": (2 * rows, np.float32),
            "token_ids": (rows, np.int64),
            "positions": ((2 + num_groups) * rows, np.int64),
            "sequences": (rows * (num_groups * max_blocks + 3 + len(AdapterRows._fields)), np.int32),
        }
        if adapter_rank:
            sizes["normed"] = (rows * config.hidden_size, np.float32)
            sizes["shrunk"] = (rows * shrunk_width(adapter_rank), np.float32)
        shapes = {
            (name, number): (size, np.dtype(dtype))
            for name, (size, dtype) in sizes.items()
            for number in range(1 if name in _ONCE else num_stages)
        }
        lengths = (round_up(size * dtype.itemsize, _PAGE) for size, dtype in shapes.values())
        *starts, num_bytes = accumulate(lengths, initial=0)
        if fd is not None and os.fstat(fd).st_size < num_bytes:
            os.ftruncate(fd, num_bytes)
        self._memory = mmap.mmap(-1 if fd is None else fd, num_bytes)
        self._arrays: dict[tuple[str, int], NDArray[Any]] = {
            key: np.frombuffer(self._memory, dtype, size, start)
            for (key, (size, dtype)), start in zip(shapes.items(), starts, strict=True)
        }

    def get(self, name: str, size: int, dtype: DTypeLike = np.float32, number: int = 0) -> NDArray[Any]:
        """See SharedBuffers.get; `number` is that of the stage or slot. Raises ConfigurationError if the step is larger
        than the memory.
        """
        array = self._arrays[name, number].view(dtype)
        if array.size < size:
            raise ConfigurationError(f"a step needs {size} elements of {name}, and the ranks share {array.size}")
        return array


def step_memory(settings: RunnerSettings, config: ModelConfig, max_blocks: int, num_groups: int, fd: int) -> StepMemory:
    """The memory of ranks that are processes."""
    num_stages, max_rows = settings.pipeline_parallel, settings.max_batch_tokens
    adapter_rank = max((adapter.rank for adapter in settings.adapters), default=0)
    return StepMemory(
        config,
        max_rows=max_rows,
        max_blocks=max_blocks,
        num_stages=num_stages,
        num_groups=num_groups,
        adapter_rank=adapter_rank,
        fd=fd,
    )


def max_sequence_blocks(settings: RunnerSettings, config: ModelConfig) -> int:
    """Blocks of a sequence for which steps need memory. Rope settings may allow more than the model's own limit; then a
    step's sequences have at most `settings.max_blocks` together, and each has at least one of the step's tokens.
    """
    return max(
        config.max_model_len // settings.block_size + 2, (settings.max_blocks or 0) // settings.max_batch_tokens + 1
    )


class StageBuffers:
    """The memory of a stage and of the step in `slot`. Implements SharedBuffers."""

    def __init__(self, memory: StepMemory, stage: int) -> None:
        self.slot = 0
        self.num_groups = memory.num_groups
        self._memory = memory
        self._stage = stage

    @property
    def version(self) -> int:
        return self.slot

    def get(self, name: str, size: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        number = self.slot if name in _OF_SLOT else 0 if name in _ONCE else self._stage
        return self._memory.get(name, size, dtype, number)


class SharedGroup:
    """One rank's view of its group. Implements RankGroup.

    `post` sends a command to all ranks of a stage, the caller excepted: in rank 0 for stages 0 and 1, in the first rank
    of another stage for the one after it. `report` is for the first ranks of later stages, `next_report`, which waits
    for one, for rank 0.
    """

    def __init__(
        self,
        rank: int,
        degrees: Degrees,
        memory: StepMemory,
        post: Callable[[int, Command], None],
        report: Callable[[Report], None] | None = None,
        next_report: Callable[[], Report] | None = None,
    ) -> None:
        self.rank = rank
        self.degrees = degrees
        self.stage, self.tensor_rank = divmod(rank, degrees.tensor)
        self.buffers = StageBuffers(memory, self.stage)
        self.counter: Int64s = memory.get("counter", 1, np.int64, self.stage)
        self._post = post
        self._report = report
        self._next_report = next_report
        self._command: Forward | None = None  # of the stage's current step
        self._in_flight: dict[int, LayerGroups] = {}  # in rank 0: steps that later stages compute, by slot

    def begin_forward(self, metadata: ForwardMetadata, layer_groups: LayerGroups) -> None:
        assert self.buffers.slot not in self._in_flight, "more steps in flight than stages"
        self._command = write_metadata(self.buffers, metadata, layer_groups)
        self._post(0, self._command)

    def end_forward(self, layer_groups: LayerGroups) -> Callable[[], None]:
        if self.degrees.pipeline == 1:
            return lambda: None
        slot = self.buffers.slot
        self._in_flight[slot] = layer_groups
        self.end_stage()
        self.buffers.slot = (slot + 1) % self.degrees.pipeline
        return partial(self._wait, slot)

    def begin_logits(self, num_rows: int) -> None:
        self._post(0, Logits(num_rows))

    def begin_capture(self) -> None:
        """In rank 0 of a single stage: let the others capture decode steps."""
        self._post(0, CaptureSteps())

    def begin_replay(self, step: StepInput, shape: StepShape) -> None:
        """In rank 0 of a single stage: let the others replay this step."""
        num_seqs, max_blocks = step.block_tables.shape
        command = RunGraph(len(step.token_ids), num_seqs, max_blocks, *shape)
        write_step(self.buffers, step, command)
        self._post(0, command)

    def put_adapter(self, slot: int, number: int) -> None:
        """In rank 0: let all others read an adapter. The steps that begin from now on come after it, in every stage."""
        for stage in range(self.degrees.pipeline):
            self._post(stage, PutAdapter(slot, number))

    def read_step(self, command: Forward, layers: Span) -> tuple[ForwardMetadata, LayerGroups]:
        """In other ranks than 0: the step that a command is about, and the groups of the stage's layers, which are
        reported. The metadata is valid until the end of the step.
        """
        self._command, self.buffers.slot = command, command.slot
        reports = command.group_size and self.tensor_rank == 0 and self.stage > 0
        announce = self._report_layers if reports else None
        groups = LayerGroups(layers.count, command.group_size, announce, layers.first)
        return read_metadata(self.buffers, command), groups

    def end_stage(self) -> None:
        """In the first rank of a stage: the stage has computed its layers. In others: nothing."""
        assert self._command is not None
        if self.tensor_rank > 0:
            return
        if self.stage + 1 < self.degrees.pipeline:
            self._post(self.stage + 1, self._command)
        else:
            assert self._report is not None
            self._report(Report(self._command.slot))

    def _report_layers(self, layers: Span) -> None:
        assert self._command is not None
        assert self._report is not None
        self._report(Report(self._command.slot, layers.first, layers.count))

    def _wait(self, slot: int) -> None:
        assert self._next_report is not None
        while slot in self._in_flight:
            report = self._next_report()
            if report.count == 0:
                del self._in_flight[report.slot]
            elif (announce := self._in_flight[report.slot].announce) is not None:
                announce(Span(report.first, report.count))


def write_metadata(memory: StageBuffers, metadata: ForwardMetadata, layer_groups: LayerGroups) -> Forward:
    """Write a step's metadata to the memory; returns the command that describes it."""
    num_seqs, max_blocks = metadata.block_tables.shape
    num_tokens = len(metadata.positions)
    group_size = 0 if layer_groups.announce is None else layer_groups.size
    command = Forward(
        memory.slot, group_size, num_tokens, num_seqs, max_blocks, metadata.num_decodes, len(metadata.adapters)
    )
    tokens, (*sequences, runs) = _views(memory, command)
    runs[:] = np.array(metadata.adapters, np.int32).ravel()
    for view, tensor in zip(tokens, (metadata.positions, metadata.rope_lengths, metadata.slot_mapping), strict=True):
        view[:] = tensor.cpu().numpy()
    tables = metadata.block_tables.flatten()
    values = (tables, metadata.context_lens, metadata.prompt_lens, metadata.query_starts)
    for view, tensor in zip(sequences, values, strict=True):
        view[:] = tensor.cpu().numpy()
    return command


def read_metadata(memory: StageBuffers, command: Forward) -> ForwardMetadata:
    """The metadata that rank 0 wrote. Its tensors are views of the memory, valid until the end of the step."""
    tokens, (*sequences, runs) = _views(memory, command)
    positions, rope_lengths, slot_mapping = map(torch.from_numpy, tokens)
    tables, context_lens, prompt_lens, query_starts = map(torch.from_numpy, sequences)
    bounds, lengths, num_decodes = query_starts.tolist(), context_lens.tolist(), command.num_decodes
    return ForwardMetadata(
        positions=positions,
        rope_lengths=rope_lengths,
        slot_mapping=slot_mapping,
        block_tables=tables.view(command.num_seqs, command.max_blocks),
        context_lens=context_lens,
        prompt_lens=prompt_lens,
        query_starts=query_starts,
        num_decodes=num_decodes,
        chunks=chunks_of(bounds, lengths, num_decodes),
        max_decode_context=max(lengths[:num_decodes], default=0),
        adapters=tuple(AdapterRows(*run) for run in runs.reshape(-1, len(AdapterRows._fields)).tolist()),
        num_groups=memory.num_groups,
    )


def write_step(memory: StageBuffers, step: StepInput, command: RunGraph) -> None:
    """Write a step for `RunGraph` to the memory."""
    memory.get("token_ids", command.num_tokens, np.int64)[: command.num_tokens] = step.token_ids
    tokens, (*sequences, _) = _views(memory, command)
    of_tokens: list[NDArray[Any]] = [step.positions, step.rope_lengths, step.slot_mapping]
    of_sequences: list[NDArray[Any]] = [
        step.block_tables.ravel(),
        step.context_lens,
        step.prompt_lens,
        step.query_starts,
    ]
    for view, array in zip([*tokens, *sequences], of_tokens + of_sequences, strict=True):
        view[:] = array


def read_step(memory: StageBuffers, command: RunGraph) -> StepInput:
    """The step that rank 0 wrote; its arrays are views of the memory. Rows to sample are not sent."""
    tokens, (tables, context_lens, prompt_lens, query_starts, _) = _views(memory, command)
    positions, rope_lengths, slot_mapping = tokens
    none: NDArray[Any] = np.zeros(0, np.int64)
    return StepInput(
        num_decodes=0 if command.graph_queries > 1 else command.num_seqs,
        token_ids=memory.get("token_ids", command.num_tokens, np.int64)[: command.num_tokens],
        positions=positions,
        rope_lengths=rope_lengths,
        slot_mapping=slot_mapping,
        block_tables=tables.reshape(command.num_seqs, command.max_blocks),
        context_lens=context_lens,
        prompt_lens=prompt_lens,
        query_starts=query_starts,
        sample_rows=none,
        copies=(),
        num_groups=memory.num_groups,
    )


def _views(memory: StageBuffers, command: Forward | RunGraph) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """The arrays of a step's metadata: of tokens (int64), and of sequences and runs (int32)."""
    num_tokens, num_seqs = command.num_tokens, command.num_seqs
    of_token = [num_tokens, num_tokens, num_tokens * memory.num_groups]
    of_tokens = _split(memory.get("positions", sum(of_token), np.int64), of_token)
    lengths = [num_seqs * command.max_blocks, num_seqs, num_seqs, num_seqs + 1]
    lengths.append(command.num_runs * len(AdapterRows._fields))
    return of_tokens, _split(memory.get("sequences", sum(lengths), np.int32), lengths)


def _split(array: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    ends = np.cumsum(lengths)
    return [array[end - length : end] for length, end in zip(lengths, ends, strict=True)]
