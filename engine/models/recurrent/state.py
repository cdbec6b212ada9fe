"""RecurrentStates: the states of sequences, read from and written to KV blocks as tensors."""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.backend import ForwardMetadata
from engine.kv_cache import KVCache
from engine.models.recurrent.config import RecurrentConfig
from engine.models.recurrent.rows import state_rows


class RecurrentStates:
    """The states in one KV cache. `begin` finds those of a pass; one thread calls all methods."""

    def __init__(self, recurrent: RecurrentConfig, cache: KVCache) -> None:
        rows, device = state_rows(recurrent, cache.layout), cache.tensor.device
        self._numbers, self._of_layer, self._in_piece = recurrent.state_numbers, rows.of_layer, rows.in_piece
        self._rows = cache.tensor.view(torch.uint8).view(-1).view(torch.float32).view(-1, rows.width)
        number = torch.arange(rows.of_layer * sum(recurrent.layers), device=device)
        piece, row = number // rows.in_piece, number % rows.in_piece
        num_blocks = cache.tensor.shape[2]
        self._block = piece // rows.num_pieces  # of a sequence's state
        self._first = piece % rows.num_pieces * (num_blocks * rows.in_piece) + row  # its row, were it in block 0
        self._of_pass = number[None]

    def begin(self, metadata: ForwardMetadata) -> None:
        """Find the states of the sequences of a pass."""
        assert metadata.states is not None
        self._of_pass = metadata.states.tables.to(torch.int64)[:, self._block] * self._in_piece + self._first

    def of_layer(self, number: int) -> "LayerStates":
        """The states of the recurrent layer with this number among its kind."""
        return LayerStates(self._rows, self._of_pass.narrow(1, number * self._of_layer, self._of_layer), self._numbers)


class LayerStates(NamedTuple):
    """The states of one layer. `places` [num_seqs, rows] are their rows in `rows`; a state has so many `numbers`."""

    rows: Tensor
    places: Tensor
    numbers: int

    def read(self, first: int, end: int) -> Tensor:
        """States of sequences [first, end) of the pass: a copy [end - first, numbers]."""
        found = self.rows.index_select(0, self.places[first:end].flatten())
        return found.view(end - first, -1)[:, : self.numbers]

    def write(self, first: int, states: Tensor) -> None:
        """Replace the states of sequences [first, first + len(states))."""
        places = self.places[first : first + len(states)]
        padded = places.shape[1] * self.rows.shape[1]
        if padded > self.numbers:
            states = torch.nn.functional.pad(states, (0, padded - self.numbers))
        self.rows.index_copy_(0, places.flatten(), states.reshape(-1, self.rows.shape[1]))
