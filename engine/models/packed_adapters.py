"""LoRA adapters as the loop of the compiled decoder reads them, and the buffers of a step that uses some."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import AdapterRows
from engine.kernels.cpu.adapters import MAX_TILE, NUM_SITES, AdapterPieces, Piece, StepAdapters
from engine.kernels.cpu.arguments import Floats
from engine.kernels.cpu.buffers import Buffers, aligned, round_up
from engine.kernels.cpu.machine import PANEL
from engine.models.adapters import AdapterWeights
from engine.models.adapters import Piece as ModulePiece
from engine.models.model_config import ModelConfig

_SITES = ("qkv", "o", "gate_up", "down")  # in the order of the kernels' numbers


class PackedAdapters:
    """All adapters of a model, in fp32 whatever the type of the weights."""

    def __init__(self, config: ModelConfig, adapters: Sequence[AdapterWeights]) -> None:
        self._hidden, self._intermediate = config.hidden_size, config.intermediate_size
        packer = _PiecePacker(config.intermediate_size)
        starts = np.zeros((len(adapters), config.num_layers, NUM_SITES + 1), np.int64)
        for number, weights in enumerate(adapters):
            for layer in range(config.num_layers):
                for site, name in enumerate(_SITES):
                    starts[number, layer, site] = len(packer.pieces)
                    packer.add(weights.get(f"layers.{layer}.{name}", ()), alternates=name == "gate_up")
                starts[number, layer, NUM_SITES] = len(packer.pieces)
        pieces = np.array(packer.pieces, np.int64).reshape(-1, len(Piece._fields))
        self._pieces = AdapterPieces(packer.packed(), pieces, starts)
        self._width = packer.width

    def step(
        self, rows: Sequence[AdapterRows], num_tokens: int, buffers: Buffers, thread_buffers: Sequence[Buffers]
    ) -> list[StepAdapters]:
        """The arguments of each thread. Without `rows` the buffers are empty."""
        num_rows = num_tokens if rows else 0
        widths = {"normed": self._hidden, "shrunk": self._width, "adapted_gate_up": 2 * self._intermediate}
        normed, shrunk, gate_up = (
            buffers.get(name, num_rows * width)[: num_rows * width].reshape(num_rows, width)
            for name, width in widths.items()
        )
        runs = np.array(rows, np.int64).reshape(-1, len(AdapterRows._fields))
        tiles = [own.get("adapter_tile", MAX_TILE * PANEL) for own in thread_buffers]
        return [StepAdapters(self._pieces, runs, normed, shrunk, gate_up, tile) for tile in tiles]


class _PiecePacker:
    """Collects the pieces of all sites, and their matrices in panels of 16 outputs."""

    def __init__(self, intermediate_size: int) -> None:
        self.pieces: list[Piece] = []
        self.width = PANEL
        """The most numbers of a x in one site."""
        self._intermediate = intermediate_size
        self._panels: list[Tensor] = []
        self._num_packed = 0

    def add(self, changes: Sequence[ModulePiece], *, alternates: bool) -> None:
        """Add what an adapter changes at one site. `alternates`: panels of gates and ups alternate in the product."""
        parts = [part for change in changes for part in (self._halves(change) if alternates else (change,))]
        self.width = max(self.width, sum(round_up(len(part.a), PANEL) for part in parts))
        for a, b, first in parts:
            column, step = first, PANEL
            if alternates:
                half, offset = divmod(first, self._intermediate)
                column, step = 2 * offset + half * PANEL, 2 * PANEL
            self.pieces.append(Piece(self._put(a), self._put(b), len(a), column, step, len(b) // PANEL))

    def _halves(self, change: ModulePiece) -> Iterator[ModulePiece]:
        """The change of gates and that of ups; a module may be both."""
        a, b, first = change
        while len(b):
            count = min(len(b), self._intermediate - first % self._intermediate)
            yield ModulePiece(a, b[:count], first)
            b, first = b[count:], first + count

    def _put(self, matrix: Tensor) -> int:
        """Keep a matrix [outputs, inputs] in panels [inputs, 16]; returns the index of its first number."""
        outputs, inputs = matrix.shape
        padded = torch.nn.functional.pad(matrix, (0, 0, 0, -outputs % PANEL))
        self._panels.append(padded.view(-1, PANEL, inputs).transpose(1, 2).reshape(-1))
        first, self._num_packed = self._num_packed, self._num_packed + padded.numel()
        return first

    def packed(self) -> Floats:
        packed: Floats = aligned(max(self._num_packed, PANEL), np.float32)
        if self._panels:
            packed[: self._num_packed] = torch.cat(self._panels).numpy()
        return packed
