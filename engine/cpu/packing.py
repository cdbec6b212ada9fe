"""Weights as the products of `matmul.py` read them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.cpu.matmul import UNIT, Weights
from engine.cpu.memory import aligned
from engine.cpu.tiles import PANEL
from engine.cpu.vectors import ZERO_POINT

_INT8_LEVELS = 127
_INT8_DEPTH = 64
_GROUP = 4


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """Columns (outputs) and inputs of a matrix; `gated`: its rows are gate and up, one after the other."""

    columns: int
    inputs: int
    gated: bool = False

    @property
    def padded_columns(self) -> int:
        """Columns in whole units."""
        return _up(self.columns, UNIT)


class Packer:
    """Packs matrices one by one into memory that was sized for all of them."""

    def __init__(self, shapes: Sequence[MatrixShape], *, int8: bool) -> None:
        self._shapes = shapes
        self._int8 = int8
        self._depths = [_up(shape.inputs, _INT8_DEPTH) if int8 else shape.inputs for shape in shapes]
        columns = [shape.padded_columns for shape in shapes]
        column_ends = np.cumsum([0, *columns])
        weight_ends = np.cumsum([0, *(c * d for c, d in zip(columns, self._depths, strict=True))])
        counts = [_up(shape.columns, PANEL) for shape in shapes]
        self.weights = Weights(
            packed=aligned(int(weight_ends[-1]), np.int8 if int8 else np.float32),
            scales=np.ones(column_ends[-1], np.float32),
            offsets=np.zeros(column_ends[-1], np.int32),
            biases=np.zeros(column_ends[-1], np.float32),
            matrices=np.array([*zip(weight_ends[:-1], column_ends[:-1], self._depths, counts, strict=True)], np.int64),
        )

    def put(self, index: int, weight: Tensor, bias: Tensor | None) -> None:
        """Matrix number `index`: weight [columns, inputs] fp32, bias [columns]."""
        shape, depth = self._shapes[index], self._depths[index]
        arrange = _interleave if shape.gated else _pad_columns
        weight = arrange(weight, shape.padded_columns)
        weight_at, column_at = self.weights.matrices[index, :2]
        columns = slice(column_at, column_at + shape.padded_columns)
        if bias is not None:
            self.weights.biases[columns] = arrange(bias, shape.padded_columns).numpy()
        target = torch.from_numpy(self.weights.packed[weight_at : weight_at + shape.padded_columns * depth])
        if not self._int8:
            target.view(-1, depth, PANEL).copy_(weight.view(-1, PANEL, depth).transpose(1, 2))
            return
        scales = weight.abs().amax(1).clamp_(min=1e-20).div_(_INT8_LEVELS)
        rounded = torch.round(weight / scales[:, None]).to(torch.int8)
        rounded = torch.nn.functional.pad(rounded, (0, depth - shape.inputs))
        self.weights.scales[columns] = scales.numpy()
        self.weights.offsets[columns] = ZERO_POINT * rounded.sum(1, dtype=torch.int32).numpy()
        panels = rounded.view(-1, PANEL, depth // _GROUP, _GROUP).transpose(1, 2)
        target.view(panels.shape).copy_(panels)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _pad_columns(values: Tensor, columns: int) -> Tensor:
    if values.shape[0] == columns:
        return values
    padded = values.new_zeros(columns, *values.shape[1:])
    padded[: values.shape[0]] = values
    return padded


def _interleave(values: Tensor, columns: int) -> Tensor:
    """Gate and up, one half each, as panels by turns."""
    half = values.shape[0] // 2
    panels = values.new_zeros(columns // (2 * PANEL), 2, PANEL, *values.shape[1:])
    for i, part in enumerate((values[:half], values[half:])):
        whole = half // PANEL
        panels[:whole, i] = part[: whole * PANEL].view(whole, PANEL, *values.shape[1:])
        if half % PANEL:
            panels[whole, i, : half % PANEL] = part[whole * PANEL :]
    return panels.flatten(0, 2)


Arrange = Callable[[Tensor, int], Tensor]
