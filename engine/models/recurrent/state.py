"""RecurrentStates: the states of sequences in KV blocks, read and written as tensors, or found there by kernels."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import ForwardMetadata
from engine.kernel_threads import KernelThreads
from engine.kernels.cpu.arguments import Address
from engine.kernels.cpu.recurrent.recurrent_arguments import (
    NO_STATE_STEPS,
    MixPart,
    Recurrent,
    StatePlaces,
    StateSteps,
    StepRows,
)
from engine.kv.cache import KVCache
from engine.models.recurrent.config import RecurrentConfig
from engine.models.recurrent.rows import state_rows


def state_steps(metadata: ForwardMetadata) -> StateSteps:
    """The sequences of a pass; none, if the model has no recurrent layers."""
    if metadata.states is None:
        return NO_STATE_STEPS
    tables, num_repeated = metadata.states
    starts, context_lens = metadata.query_starts.numpy(), metadata.context_lens.numpy()
    return StateSteps(tables.numpy().astype(np.int64), np.array(num_repeated, np.int32), starts, context_lens)


class Mixing(NamedTuple):
    """How threads compute recurrent layers where their states lie, with engine/kernels/cpu/recurrent/recurrence.py."""

    mix: Callable[[Recurrent, int, StateSteps, StepRows, MixPart], None]
    threads: KernelThreads
    multiply: Address  # recurrence.multiply_address


class RecurrentStates:
    """The states in one KV cache. `begin` finds those of a pass; one thread calls all methods. Without `mixing`, torch
    computes the layers.
    """

    def __init__(self, recurrent: RecurrentConfig, cache: KVCache, mixing: Mixing | None = None) -> None:
        rows, device = state_rows(recurrent, cache.layout), cache.tensor.device
        self._numbers, self._of_layer, self._in_piece = recurrent.state_numbers, rows.of_layer, rows.in_piece
        self._rows = cache.tensor.view(torch.uint8).view(-1).view(torch.float32).view(-1, rows.width)
        number = torch.arange(rows.of_layer * sum(recurrent.layers), device=device)
        piece, row = number // rows.in_piece, number % rows.in_piece
        num_blocks = cache.tensor.shape[2]
        first = piece % rows.num_pieces * (num_blocks * rows.in_piece) + row
        self._rows_of_state = (piece // rows.num_pieces, first)
        self._tables = torch.zeros((1, rows.num_blocks), dtype=torch.int64, device=device)
        self._steps = NO_STATE_STEPS
        self._mixing = mixing

    def begin(self, metadata: ForwardMetadata) -> None:
        """Find the states of the sequences of a pass."""
        assert metadata.states is not None
        self._tables = metadata.states.tables.to(torch.int64)
        if self._mixing is not None:
            self._steps = state_steps(metadata)

    @property
    def places(self) -> StatePlaces:
        """Where the kernels find the states of all layers."""
        block, first = (of_state.numpy() for of_state in self._rows_of_state)
        return StatePlaces(self._rows.numpy(), block, first, self._in_piece, self._of_layer)

    def of_layer(self, number: int) -> "LayerStates":
        """The states of the recurrent layer with this number among its kind."""
        block, first = (of_state.narrow(0, number * self._of_layer, self._of_layer) for of_state in self._rows_of_state)
        facts = (self._rows, self._tables, block, first, self._in_piece, self._numbers)
        return LayerStates(*facts, self._steps, self._mixing)


class LayerStates(NamedTuple):
    """The states of one layer, flat numbers in `rows`. Row i of a state is `first[i]`, if its block, number `block[i]`
    in the table of the sequence [num_seqs, state_blocks], is block 0, and `in_piece` rows further on in each next one.
    """

    rows: Tensor
    tables: Tensor
    block: Tensor
    first: Tensor
    in_piece: int
    numbers: int
    steps: StateSteps
    mixing: Mixing | None

    def of(self, first: int, end: int) -> "LayerStates":
        """The states of sequences [first, end) of these."""
        return self._replace(tables=self.tables[first:end])

    def read(self) -> Tensor:
        """Return a copy of the states [num_seqs, numbers]."""
        found = self.rows.index_select(0, self._places().flatten())
        return found.view(len(self.tables), -1)[:, : self.numbers]

    def write(self, states: Tensor) -> None:
        """Replace the states [num_seqs, numbers]."""
        padded = len(self.block) * self.rows.shape[1]
        if padded > self.numbers:
            states = torch.nn.functional.pad(states, (0, padded - self.numbers))
        self.rows.index_copy_(0, self._places().flatten(), states.reshape(-1, self.rows.shape[1]))

    @property
    def places(self) -> StatePlaces:
        """Where the kernels find them, as those of a model with one layer."""
        block, first = self.block.numpy(), self.first.numpy()
        return StatePlaces(self.rows.numpy(), block, first, self.in_piece, len(block))

    def _places(self) -> Tensor:
        """The rows of each sequence's state: [num_seqs, rows of a state]."""
        return self.tables[:, self.block] * self.in_piece + self.first
