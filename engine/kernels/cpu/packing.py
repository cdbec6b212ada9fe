"""Weights in the layout that the products of `matmul.py` read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from engine.kernels.cpu.arguments import Array, Weights
from engine.kernels.cpu.buffers import aligned, round_up
from engine.kernels.cpu.machine import GROUP, HALF_BYTES, PANEL, UNIT, ZERO_POINT

DTYPES: Mapping[torch.dtype, DTypeLike] = {
    torch.float32: np.float32,
    torch.float16: np.uint16,
    torch.bfloat16: np.int16,
    torch.int8: np.int8,
}
"""Types of weights, and the numpy types that stand for them: numba has neither fp16 nor bf16 on CPU."""
_INT8_DEPTH = 64
"""Inputs are padded to a multiple of it in int8: the bytes in a row of an AMX tile."""


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """Columns (outputs) and inputs of a matrix. `gated`: its outputs are all gates, then all ups."""

    columns: int
    inputs: int
    gated: bool = False

    @property
    def padded_columns(self) -> int:
        return round_up(self.columns, UNIT)


class Packer:
    """Packs matrices one by one into memory that is allocated for all of them."""

    def __init__(self, shapes: Sequence[MatrixShape], dtype: torch.dtype) -> None:
        self._shapes = shapes
        int8 = dtype == torch.int8
        self._depths = [round_up(shape.inputs, _INT8_DEPTH) if int8 else shape.inputs for shape in shapes]
        columns = [shape.padded_columns for shape in shapes]
        column_ends = np.cumsum([0, *columns])
        weight_ends = np.cumsum([0, *(c * d for c, d in zip(columns, self._depths, strict=True))])
        counts = [round_up(shape.columns, PANEL) for shape in shapes]
        self.weights = Weights(
            packed=aligned(int(weight_ends[-1]), DTYPES[dtype]),
            scales=np.ones(column_ends[-1], np.float32),
            offsets=np.zeros(column_ends[-1], np.int32),
            biases=np.zeros(column_ends[-1], np.float32),
            matrices=np.array([*zip(weight_ends[:-1], column_ends[:-1], self._depths, counts, strict=True)], np.int64),
        )

    def put(self, index: int, weight: Tensor, *, scales: Tensor | None = None, bias: Tensor | None = None) -> None:
        """Pack matrix number `index`; its outputs become columns.

        weight: [outputs, inputs] of the packer's dtype; scales, for int8, and bias: fp32 [outputs].
        """
        shape, depth = self._shapes[index], self._depths[index]
        arrange = _interleave if shape.gated else _pad_columns
        weight = arrange(weight, shape.padded_columns)
        weight_at, column_at = self.weights.matrices[index, :2]
        columns = slice(column_at, column_at + shape.padded_columns)
        if bias is not None:
            self.weights.biases[columns] = arrange(bias, shape.padded_columns).numpy()
        target = as_tensor(self.weights.packed[weight_at : weight_at + shape.padded_columns * depth])
        if scales is None:
            target.view(-1, depth, PANEL).copy_(weight.view(-1, PANEL, depth).transpose(1, 2))
            return
        weight = torch.nn.functional.pad(weight, (0, depth - shape.inputs))
        self.weights.scales[columns] = arrange(scales, shape.padded_columns).numpy()
        self.weights.offsets[columns] = ZERO_POINT * weight.sum(1, dtype=torch.int32).numpy()
        panels = weight.view(-1, PANEL, depth // GROUP, GROUP).transpose(1, 2)
        target.view(panels.shape).copy_(panels)


def as_tensor(weights: Array) -> Tensor:
    """Weights in one of `DTYPES` as a tensor of the type that they stand for; shares their memory."""
    dtype = next(dtype for dtype, stored in DTYPES.items() if weights.dtype == stored)
    return torch.from_numpy(weights).view(dtype)


def as_array(weights: Tensor) -> Array:
    """The reverse of `as_tensor`."""
    array: Array = weights.view(torch.int16).numpy() if weights.itemsize == HALF_BYTES else weights.numpy()
    return array.view(DTYPES[weights.dtype])


def _pad_columns(values: Tensor, columns: int) -> Tensor:
    if values.shape[0] == columns:
        return values
    padded = values.new_zeros(columns, *values.shape[1:])
    padded[: values.shape[0]] = values
    return padded


def _interleave(values: Tensor, columns: int) -> Tensor:
    """Rearrange the halves, gate and up, as alternating panels."""
    half = values.shape[0] // 2
    panels = values.new_zeros(columns // (2 * PANEL), 2, PANEL, *values.shape[1:])
    num_full = half // PANEL
    for i, rows in enumerate((values[:half], values[half:])):
        panels[:num_full, i] = rows[: num_full * PANEL].view(num_full, PANEL, *values.shape[1:])
        if half % PANEL:
            panels[num_full, i, : half % PANEL] = rows[num_full * PANEL :]
    return panels.flatten(0, 2)
