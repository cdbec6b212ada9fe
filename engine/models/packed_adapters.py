"""LoRA adapters as the loop of the compiled decoder reads them.

The threads of all ranks of a stage divide the rows of a step, so a rank has each matrix whole, except the outputs of
other ranks' heads.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.adapters import (
    DOWN_SITE,
    GATE_UP_SITE,
    INPUT_GATE_SITE,
    INPUT_PROJECTION_SITE,
    NUM_SITES,
    OUTPUT_SITE,
    QKV_SITE,
    RECURRENT_IN_SITE,
    RECURRENT_OUT_SITE,
    AdapterPieces,
    PackedPiece,
    shrunk_width,
)
from engine.kernels.cpu.arguments import Floats
from engine.kernels.cpu.buffers import aligned
from engine.kernels.cpu.machine import PANEL
from engine.models.adapters import AdapterWeights, ModulePiece
from engine.models.model_config import ModelConfig
from engine.models.packed_decoder import matrix_names
from engine.models.share import RankShare

_SITES = {
    "qkv": QKV_SITE,
    "o": OUTPUT_SITE,
    "gate_up": GATE_UP_SITE,
    "up": GATE_UP_SITE,
    "down": DOWN_SITE,
    "recurrent_in": RECURRENT_IN_SITE,
    "recurrent_out": RECURRENT_OUT_SITE,
    "input_gate": INPUT_GATE_SITE,
    "input_projection": INPUT_PROJECTION_SITE,
}
"""By the names of a layer's matrices."""


class PackedAdapters:
    """Adapters of a rank's layers in `num_slots` slots, each large enough for any of `shapes`. They are in fp32,
    whatever the type of the weights. A slot's memory is used from its first `put` on.
    """

    def __init__(self, config: ModelConfig, shapes: Sequence[AdapterWeights], num_slots: int, share: RankShare) -> None:
        self._config = config
        self._share = share
        sizes = [_packed(config, weights, share) for weights in shapes]
        self._num_pieces = max((size.num_pieces for size in sizes), default=0)
        self._num_numbers = max((size.num_numbers for size in sizes), default=0)
        ranks = (len(piece.a) for weights in shapes for pieces in weights.values() for piece in pieces)
        self.shrunk_width = shrunk_width(max(ranks, default=1))
        self.pieces = AdapterPieces(
            aligned(max(num_slots * self._num_numbers, PANEL), np.float32),
            np.zeros((num_slots * self._num_pieces, len(PackedPiece._fields)), np.int64),
            np.zeros((num_slots, share.layers.count, NUM_SITES + 1), np.int64),
        )

    def put(self, slot: int, weights: AdapterWeights) -> None:
        """Pack an adapter into a slot, which no step uses meanwhile."""
        first_piece, first_number = slot * self._num_pieces, slot * self._num_numbers
        packer = _packed(self._config, weights, self._share, first_number)
        self.pieces.pieces[first_piece : first_piece + packer.num_pieces] = np.array(packer.pieces, np.int64)
        self.pieces.starts[slot] = first_piece + np.array(packer.starts, np.int64)
        packer.write(self.pieces.packed[first_number : first_number + self._num_numbers])


def _packed(config: ModelConfig, weights: AdapterWeights, share: RankShare, first_number: int = 0) -> "_PiecePacker":
    packer = _PiecePacker(first_number)
    for layer in range(share.layers.first, share.layers.end):
        packer.starts.append([])
        names = {_SITES.get(name): name for name in matrix_names(config, layer)}
        for site in range(NUM_SITES):
            packer.starts[-1].append(len(packer.pieces))
            if (name := names.get(site)) is not None:
                changes = weights.get(f"layers.{layer}.{name}", ())
                if name == "qkv" and config.attention_gate:
                    changes = tuple(_with_gates_last(changes, config))
                packer.add(changes, config.of_layer(layer).intermediate_size if name == "gate_up" else None)
        packer.starts[-1].append(len(packer.pieces))
    return packer


class _PiecePacker:
    """Collects the pieces of an adapter at all sites, and their matrices in panels of 16 outputs. `starts`: the first
    piece of each layer's sites, and the end of the last.
    """

    def __init__(self, first_number: int) -> None:
        self.pieces: list[PackedPiece] = []
        self.starts: list[list[int]] = []
        self._panels: list[Tensor] = []
        self._first = self._end = first_number

    @property
    def num_pieces(self) -> int:
        return len(self.pieces)

    @property
    def num_numbers(self) -> int:
        """Numbers of all packed matrices."""
        return self._end - self._first

    def add(self, changes: Sequence[ModulePiece], inner: int | None) -> None:
        """Add what an adapter changes at one site. `inner`: the number of gates, if their panels and those of ups
        alternate in the product.
        """
        parts = [part for change in changes for part in (_halves(change, inner) if inner else (change,))]
        for a, b, first in parts:
            column, step = first, PANEL
            if inner:
                half, offset = divmod(first, inner)
                column, step = 2 * offset + half * PANEL, 2 * PANEL
            self.pieces.append(PackedPiece(self._put(a), self._put(b), len(a), column, step, len(b)))

    def _put(self, matrix: Tensor) -> int:
        """Keep a matrix [outputs, inputs] in panels [inputs, 16]; returns the index of its first number."""
        outputs, inputs = matrix.shape
        padded = torch.nn.functional.pad(matrix, (0, 0, 0, -outputs % PANEL))
        self._panels.append(padded.view(-1, PANEL, inputs).transpose(1, 2).reshape(-1))
        first, self._end = self._end, self._end + padded.numel()
        return first

    def write(self, out: Floats) -> None:
        """Write the packed numbers to the start of `out`."""
        if self._panels:
            out[: self.num_numbers] = torch.cat(self._panels).numpy()


def _with_gates_last(changes: Sequence[ModulePiece], config: ModelConfig) -> Iterator[ModulePiece]:
    """The changes of queries with gates, keys and values, in the order of the packed matrix; see packed_decoder.py."""
    width, of_kv = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    for a, b, first in changes:
        if first >= 2 * width:
            yield ModulePiece(a, b, first - width)
            continue
        num_queries = max(0, width - first)  # a module is queries and gates, or one of them
        if num_queries:
            yield ModulePiece(a, b[:num_queries], first)
        if len(b) > num_queries:
            yield ModulePiece(a, b[num_queries:], max(first, width) + of_kv)


def _halves(change: ModulePiece, inner: int) -> Iterator[ModulePiece]:
    """The change of gates and that of ups; a module may be both."""
    a, b, first = change
    while len(b):
        count = min(len(b), inner - first % inner)
        yield ModulePiece(a, b[:count], first)
        b, first = b[count:], first + count
