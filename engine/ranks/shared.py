"""A group of ranks on one machine: memory that all of them map, and the commands of rank 0.

The memory has no name (memfd): it is gone when the last rank is. It holds the counter of the ranks' barrier, the
activations, and the step's metadata. Rank 0 writes embedded tokens and metadata, then sends a command of a few bytes on
each rank's socket. The ranks meet at the barrier within every layer, so when rank 0 has finished a step, no rank reads
the memory any more.
"""

import mmap
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from engine.attention.backend import ForwardMetadata, chunks_of
from engine.kernels.cpu.arguments import Int64s
from engine.kernels.cpu.machine import PANEL, TILE_ROWS
from engine.models.model_config import ModelConfig
from mesh.domain.errors import ConfigurationError

_PAGE = 4096
_DEPTH_MULTIPLE = 64
"""Rows of a product's left operand are padded to a multiple of it."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The command to compute the layers of a step. The sizes give the shapes of the metadata in memory."""

    num_tokens: int
    num_seqs: int
    max_blocks: int
    num_decodes: int


@dataclass(frozen=True, slots=True)
class Logits:
    """The command to compute logits."""

    num_rows: int


Command = Forward | Logits
_COMMAND = struct.Struct("<5q")  # kind, then the fields, padded with 0


def encode_command(command: Command) -> bytes:
    if isinstance(command, Logits):
        return _COMMAND.pack(2, command.num_rows, 0, 0, 0)
    return _COMMAND.pack(1, command.num_tokens, command.num_seqs, command.max_blocks, command.num_decodes)


def decode_command(message: bytes) -> Command:
    """Raises ValueError for a message that is not a command."""
    if len(message) != _COMMAND.size:
        raise ValueError(f"a command has {_COMMAND.size} bytes, not {len(message)}")
    kind, *fields = _COMMAND.unpack(message)
    if kind == 1:
        command = Forward(*fields)
        if not (0 <= command.num_decodes <= command.num_seqs <= command.num_tokens and command.max_blocks >= 0):
            raise ValueError(f"impossible command: {command}")
        return command
    if kind == 2 and fields[0] >= 0:
        return Logits(fields[0])
    raise ValueError(f"command {kind} of {fields} is not known")


class StepMemory:
    """The memory that the ranks of a group share: named arrays of fixed sizes. Pages that no step has used take none.

    `max_rows` limits the tokens of a step, `max_blocks` the blocks of a sequence. `fd`: a file for several processes,
    which grows to the size that is needed; without it the memory is for threads of this process.
    """

    def __init__(self, config: ModelConfig, *, max_rows: int, max_blocks: int, fd: int | None = None) -> None:
        depth = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        depth = -(-depth // _DEPTH_MULTIPLE) * _DEPTH_MULTIPLE
        rows, vocab = max_rows + 1, -(-config.vocab_size // PANEL) * PANEL
        sizes = {
            "counter": (1, np.int64),
            "residual": (rows * config.hidden_size, np.float32),
            "inner": (rows * config.intermediate_size, np.float32),
            "mixed": (rows * config.num_heads * config.head_dim, np.float32),
            "a": ((max_rows + TILE_ROWS) * depth * 4, np.uint8),
            "factors": (rows, np.float32),
            "output_rows": (rows * config.hidden_size, np.float32),
            "logits": (rows * vocab, np.float32),
            "token_ids": (rows, np.int64),
            "positions": (3 * rows, np.int64),
            "sequences": (rows * (max_blocks + 3), np.int32),
        }
        starts = np.cumsum([0, *(_round_up(size * np.dtype(dtype).itemsize) for size, dtype in sizes.values())])
        num_bytes = int(starts[-1])
        if fd is not None and os.fstat(fd).st_size < num_bytes:
            os.ftruncate(fd, num_bytes)
        self._memory = mmap.mmap(-1 if fd is None else fd, num_bytes)
        self._arrays: dict[str, NDArray[Any]] = {
            name: np.frombuffer(self._memory, dtype, size, int(start))
            for (name, (size, dtype)), start in zip(sizes.items(), starts, strict=False)
        }

    def get(self, name: str, size: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """See SharedBuffers.get. Raises ConfigurationError if the step is larger than the memory."""
        array = self._arrays[name].view(dtype)
        if array.size < size:
            raise ConfigurationError(f"a step needs {size} elements of {name}, and the ranks share {array.size}")
        return array


class SharedGroup:
    """One rank's view of its group. `post` sends a command to the other ranks; only rank 0 has it."""

    def __init__(self, rank: int, size: int, memory: StepMemory, post: Callable[[Command], None] | None = None) -> None:
        self.rank = rank
        self.size = size
        self.buffers = memory
        self.counter: Int64s = memory.get("counter", 1, np.int64)
        self._post = post

    def begin_forward(self, metadata: ForwardMetadata) -> None:
        if self._post is not None:
            self._post(write_metadata(self.buffers, metadata))

    def begin_logits(self, num_rows: int) -> None:
        if self._post is not None:
            self._post(Logits(num_rows))


def write_metadata(memory: StepMemory, metadata: ForwardMetadata) -> Forward:
    """Write a step's metadata to the memory; returns the command that describes it."""
    num_seqs, max_blocks = metadata.block_tables.shape
    num_tokens = len(metadata.positions)
    tokens, sequences = _views(memory, num_tokens, num_seqs, max_blocks)
    for view, tensor in zip(tokens, (metadata.positions, metadata.rope_lengths, metadata.slot_mapping), strict=True):
        view[:] = tensor.numpy()
    tables = metadata.block_tables.flatten()
    values = (tables, metadata.context_lens, metadata.prompt_lens, metadata.query_starts)
    for view, tensor in zip(sequences, values, strict=True):
        view[:] = tensor.numpy()
    return Forward(num_tokens, num_seqs, max_blocks, metadata.num_decodes)


def read_metadata(memory: StepMemory, command: Forward) -> ForwardMetadata:
    """The metadata that rank 0 wrote. Its tensors are views of the memory, valid until the end of the step."""
    tokens, sequences = _views(memory, command.num_tokens, command.num_seqs, command.max_blocks)
    positions, rope_lengths, slots = map(torch.from_numpy, tokens)
    tables, context_lens, prompt_lens, query_starts = map(torch.from_numpy, sequences)
    bounds, lengths, num_decodes = query_starts.tolist(), context_lens.tolist(), command.num_decodes
    return ForwardMetadata(
        positions=positions,
        rope_lengths=rope_lengths,
        slot_mapping=slots,
        block_tables=tables.view(command.num_seqs, command.max_blocks),
        context_lens=context_lens,
        prompt_lens=prompt_lens,
        query_starts=query_starts,
        num_decodes=num_decodes,
        chunks=chunks_of(bounds, lengths, num_decodes),
        max_decode_context=max(lengths[:num_decodes], default=0),
    )


def _views(
    memory: StepMemory, num_tokens: int, num_seqs: int, max_blocks: int
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """The arrays of a step's metadata: of tokens (int64), and of sequences (int32)."""
    of_tokens = _split(memory.get("positions", 3 * num_tokens, np.int64), [num_tokens] * 3)
    lengths = [num_seqs * max_blocks, num_seqs, num_seqs, num_seqs + 1]
    return of_tokens, _split(memory.get("sequences", sum(lengths), np.int32), lengths)


def _split(array: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    ends = np.cumsum(lengths)
    return [array[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
