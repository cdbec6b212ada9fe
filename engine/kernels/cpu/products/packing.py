"""Weights in the layout that the products of `matmul.py` read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from engine.kernels.cpu.arguments import COLUMN_AT, DEPTH, NUMBERS, ORDER_END, WEIGHT_AT, Array, Int32s, Int64s, Weights
from engine.kernels.cpu.buffers import aligned, round_up
from engine.kernels.cpu.machine import (
    BLOCK_HEAD_BYTES,
    CACHE_LINE_BYTES,
    EIGHT_BITS,
    FLOAT_BYTES,
    FOUR_BITS,
    FP8_FACTOR,
    HALF_BYTES,
    IN_BF16,
    IN_FP32,
    PAIR,
    PANEL,
    QUAD,
    SLOT_BYTES,
    STEP_GROUP,
    STEPS,
    UNIT,
    VECTOR_BYTES,
    WITH_MINIMA,
    ZERO_POINT,
    knows_bf16,
    knows_vnni,
    widens_ahead,
)
from engine.kernels.cpu.products.nibble_numbers import bytes_per_input, panel_bytes, scales_bytes
from engine.kernels.cpu.products.steps import HEAD_BYTES, stepped_panel_bytes
from engine.kernels.cpu.products.tiles import form_bytes

DTYPES: Mapping[torch.dtype, DTypeLike] = {
    torch.float32: np.float32,
    torch.float16: np.uint16,
    torch.bfloat16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.float8_e4m3fn: np.bool_,
    torch.int64: np.int64,
}
"""Types of weights, and the numpy types that stand for them: numba has neither fp16 nor bf16 on CPU, nor fp8. uint8 is
int4, int64 int4 in steps of int8. A model in fp8 may have bf16 and fp32 beside it: see MatrixShape.runs.
"""
_INPUTS_IN_LANE = {torch.int8: QUAD, torch.bfloat16: PAIR}
"""Inputs that lie side by side in each of a panel's columns."""
_SUMMED_AT_ONCE = 2**20
_LARGEST_MINIMUM = 2**8
"""The size of a minimum beside the largest scale of its output up to which scales are what they are without minima."""
_INT8_DEPTH = 64
"""Inputs are padded to a multiple of it in int8: the bytes in a row of an AMX tile."""


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """Columns (outputs) and inputs of a matrix. `gated`: its outputs are all gates, then all ups. `group`: inputs that
    share a scale, in int4; one of INT4_GROUPS. `numbers`: FOUR_BITS, as much room as levels take, EIGHT_BITS or
    WITH_MINIMA. `runs`, in fp8: how many units have one form, and that form (machine.py), one run after the other.
    """

    columns: int
    inputs: int
    gated: bool = False
    group: int = 0
    numbers: int = FOUR_BITS
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def padded_columns(self) -> int:
        return round_up(self.columns, UNIT)

    @property
    def num_groups(self) -> int:
        """Groups of inputs; the last may be narrower."""
        return -(-self.inputs // self.group)


class Packer:
    """Packs matrices one by one into memory that is allocated for all of them."""

    def __init__(self, shapes: Sequence[MatrixShape], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._shapes = shapes
        columns = [shape.padded_columns for shape in shapes]
        column_ends = np.cumsum([0, *columns])
        weight_ends = np.cumsum([0, *(_num_elements(shape, dtype) for shape in shapes)])
        depths = [_row_elements(shape, dtype) for shape in shapes]
        counts = [round_up(shape.columns, PANEL) for shape in shapes]
        groups = [shape.group for shape in shapes]
        numbers = [STEPS if dtype == torch.int64 else shape.numbers for shape in shapes]
        no_order = [0] * len(shapes)
        facts = [*zip(weight_ends[:-1], column_ends[:-1], depths, counts, groups, no_order, numbers, strict=True)]
        self._orders: list[Int32s] = []
        self._weights = Weights(
            packed=aligned(int(weight_ends[-1]), DTYPES[dtype]),
            scales=np.ones(column_ends[-1], np.float32),
            offsets=np.zeros(column_ends[-1], np.int32),
            biases=np.zeros(column_ends[-1], np.float32),
            matrices=np.array(facts, np.int64),
            orders=np.empty(0, np.int32),
            units=np.concatenate([np.empty((0, 2), np.int64), *map(_unit_table, shapes)]),
        )

    @property
    def weights(self) -> Weights:
        """The matrices that were put."""
        return self._weights._replace(orders=np.concatenate([self._weights.orders, *self._orders]))

    def put(self, index: int, weight: Tensor, *, scales: Tensor | None = None, bias: Tensor | None = None) -> None:
        """Pack matrix number `index`; its outputs become columns.

        weight: [outputs, inputs] of the packer's dtype; scales, for int8, and bias: fp32 [outputs].
        """
        shape, depth = self._shapes[index], int(self._weights.matrices[index, DEPTH])
        arrange = _interleave if shape.gated else _pad_columns
        weight = arrange(weight, shape.padded_columns)
        columns = self._put_bias(index, bias)
        target = self._target(index, shape.padded_columns * depth).view(weight.dtype)
        if scales is not None:
            weight = _pad_inputs(weight, depth)
            self._weights.scales[columns] = arrange(scales, shape.padded_columns).numpy()
            self._weights.offsets[columns] = ZERO_POINT * _row_sums(weight).numpy()
        together = _INPUTS_IN_LANE.get(weight.dtype, 1)
        panels = weight.view(-1, PANEL, depth // together, together).transpose(1, 2)
        target.view(panels.shape).copy_(panels)

    def put_groups(
        self,
        index: int,
        weight: Tensor,
        scales: Tensor,
        zeros: Tensor,
        bias: Tensor | None,
        *,
        levels: int | None = None,
    ) -> None:
        """Pack matrix number `index` in int4: number [output, input] is (weight - zeros[group]) * scales[group]. With
        `levels`, MXFP4 or NF4, weights are numbers of levels, see nibbles.py. WITH_MINIMA `zeros` are minima.

        weight: uint8 [outputs, inputs], 0 to 15, or to 255 if they are EIGHT_BITS; scales: fp32 [outputs, num_groups],
        kept in fp16 beside a power of two for each output; zeros: uint8 as scales; minima: as scales; bias: fp32
        [outputs].
        """
        shape, num_groups = self._shapes[index], self._shapes[index].num_groups
        arrange = _interleave if shape.gated else _pad_columns
        weight, scales, zeros = (arrange(values, shape.padded_columns) for values in (weight, scales, zeros))
        columns, num_panels = self._put_bias(index, bias), shape.padded_columns // PANEL
        if levels is not None:
            self._weights.matrices[index, NUMBERS] = levels
        largest, head_bytes = scales.abs().amax(1), num_groups * scales_bytes(shape.numbers)
        if shape.numbers == WITH_MINIMA:
            largest = torch.maximum(largest, zeros.abs().amax(1) / _LARGEST_MINIMUM)
        powers = torch.exp2(torch.frexp(largest).exponent - 1)
        self._weights.scales[columns] = powers.numpy()
        target = self._target(index, _num_elements(shape, torch.uint8)).view(num_panels, -1)
        heads = target[:, :head_bytes].view(num_panels, num_groups, -1)
        kept = (
            (scales / powers[:, None]).half(),
            zeros if zeros.dtype == torch.uint8 else (zeros / powers[:, None]).half(),
        )
        of_scales, of_zeros = (
            values.view(num_panels, PANEL, num_groups).transpose(1, 2).contiguous().view(torch.uint8) for values in kept
        )
        heads[:, :, : PANEL * HALF_BYTES], heads[:, :, PANEL * HALF_BYTES :] = of_scales, of_zeros
        weight = _pad_inputs(weight, num_groups * shape.group)
        packed = target[:, round_up(head_bytes, CACHE_LINE_BYTES) :].view(num_panels, -1, PANEL, QUAD)
        if shape.numbers == EIGHT_BITS:
            packed.copy_(weight.view(num_panels, PANEL, -1, QUAD).transpose(1, 2))
        else:
            octets = weight.view(num_panels, PANEL, -1, 2, QUAD).permute(3, 0, 2, 1, 4)
            torch.bitwise_or(octets[0], octets[1] << 4, out=packed)

    def put_steps(
        self, index: int, weight: Tensor, scales: Tensor, steps: Tensor, lows: Tensor, bias: Tensor | None
    ) -> None:
        """Pack matrix number `index` in steps of int8: number [output, input] is (lows[group] + steps[group] * weight)
        * scales[output].

        weight: uint8 [outputs, inputs], 0 to 15, of whole groups; scales and bias: fp32 [outputs]; steps: uint8, and
        lows: int8, [outputs, num_groups].
        """
        shape, depth = self._shapes[index], int(self._weights.matrices[index, DEPTH])
        if not shape.columns:
            return
        arrange, num_panels = _interleave if shape.gated else _pad_columns, shape.padded_columns // PANEL
        weight, scales, steps, lows = (
            arrange(values, shape.padded_columns) for values in (weight, scales, steps, lows)
        )
        weight = _pad_inputs(weight, depth)
        steps, lows = (_pad_inputs(values, depth // STEP_GROUP) for values in (steps, lows))
        columns = self._put_bias(index, bias)
        self._weights.scales[columns] = scales.numpy()
        levels = _row_sums(weight.view(-1, STEP_GROUP)).view(steps.shape)  # of each group
        sums = (levels * steps + STEP_GROUP * lows.int()).sum(1, dtype=torch.int32)
        self._weights.offsets[columns] = ZERO_POINT * sums.numpy()
        target = self._target(index, _num_elements(shape, torch.int64)).view(torch.uint8).view(num_panels, -1)
        head_bytes = depth // STEP_GROUP * HEAD_BYTES
        heads = target[:, :head_bytes].view(num_panels, -1, 2, PANEL)
        for place, values in enumerate((steps, lows.view(torch.uint8))):
            heads[:, :, place] = values.view(num_panels, PANEL, -1).transpose(1, 2)
        octets = weight.view(num_panels, PANEL, -1, 2, QUAD).permute(3, 0, 2, 1, 4)
        torch.bitwise_or(octets[0], octets[1] << 4, out=target[:, head_bytes:].view(octets[0].shape))

    def put_forms(
        self, index: int, numbers: Tensor | None, octets: Tensor | None, scales: Tensor | None, bias: Tensor | None
    ) -> None:
        """Pack matrix number `index` of a model in fp8.

        numbers: fp32 or bf16 [outputs, inputs], of which units that are not fp8 are packed; octets, e4m3 [outputs,
        inputs], and scales, fp32 [outputs, groups], are for the others; bias: fp32 [outputs].
        """
        shape, first = self._shapes[index], 0
        arrange = _interleave if shape.gated else _pad_columns
        self._put_bias(index, bias)
        given = (numbers, None if octets is None else octets.view(torch.uint8), scales)
        arranged = [None if values is None else arrange(values, shape.padded_columns) for values in given]
        target = self._target(index, _num_elements(shape, torch.float8_e4m3fn)).view(torch.uint8)
        for count, form in shape.runs:
            columns, size = slice(first * UNIT, (first + count) * UNIT), count * 2 * form_bytes(shape.inputs, form)
            _put_run(target[:size].view(2 * count, -1), form, *(None if v is None else v[columns] for v in arranged))
            target, first = target[size:], first + count

    def multiply(self, index: int, factor: float) -> None:
        """Multiply what products with matrix number `index` give, but for the bias."""
        first, columns = self._weights.matrices[index, COLUMN_AT], self._shapes[index].padded_columns
        self._weights.scales[first : first + columns] *= np.float32(factor)

    def put_order(self, index: int, order: Tensor) -> None:
        """Matrix number `index` was put with its inputs in this order: int [inputs], the input in each place."""
        self._orders.append(order.to(torch.int32).numpy())
        self._weights.matrices[index, ORDER_END] = sum(map(len, self._orders))

    def _put_bias(self, index: int, bias: Tensor | None) -> slice:
        """Returns the matrix's columns."""
        shape, column_at = self._shapes[index], self._weights.matrices[index, COLUMN_AT]
        columns = slice(column_at, column_at + shape.padded_columns)
        if bias is not None:
            arrange = _interleave if shape.gated else _pad_columns
            self._weights.biases[columns] = arrange(bias, shape.padded_columns).numpy()
        return columns

    def _target(self, index: int, num_elements: int) -> Tensor:
        weight_at = self._weights.matrices[index, WEIGHT_AT]
        return as_tensor(self._weights.packed[weight_at : weight_at + num_elements])


def _row_elements(shape: MatrixShape, dtype: torch.dtype) -> int:
    """Elements of a row of the left operand."""
    if dtype == torch.uint8:
        return shape.num_groups * (shape.group + BLOCK_HEAD_BYTES)
    return round_up(shape.inputs, _INT8_DEPTH) if dtype in (torch.int8, torch.int64) else shape.inputs


def _num_elements(shape: MatrixShape, dtype: torch.dtype) -> int:
    """Elements of a packed matrix."""
    if dtype == torch.float8_e4m3fn:
        return sum(count * 2 * form_bytes(shape.inputs, form) for count, form in shape.runs)
    if dtype == torch.int64:
        return shape.padded_columns // PANEL * stepped_panel_bytes(_row_elements(shape, dtype)) // SLOT_BYTES
    if dtype != torch.uint8:
        return shape.padded_columns * _row_elements(shape, dtype)
    group_bytes = shape.group * bytes_per_input(shape.numbers)
    return shape.padded_columns // PANEL * panel_bytes(shape.num_groups, group_bytes, scales_bytes(shape.numbers))


def unit_runs(columns: int, forms: Tensor, *, gated: bool) -> tuple[tuple[int, int], ...]:
    """`MatrixShape.runs` of a matrix whose outputs have these forms, int64 [outputs]. A unit of several is in fp32."""
    arrange, padded = _interleave if gated else _pad_columns, round_up(columns, UNIT)
    units = arrange(forms + 1, padded).view(-1, UNIT)  # 0 stands for padding
    most = units.amax(1)
    least = torch.where(units == 0, most[:, None], units).amin(1)
    of_units, counts = torch.unique_consecutive(torch.where(most == least, most - 1, IN_FP32), return_counts=True)
    return tuple(zip(counts.tolist(), of_units.tolist(), strict=True))


def _unit_table(shape: MatrixShape) -> Int64s:
    """`Weights.units` of a matrix."""
    sizes = np.repeat(
        np.array([2 * form_bytes(shape.inputs, form) for _, form in shape.runs], np.int64),
        counts := np.array([count for count, _ in shape.runs], np.int64),
    )
    forms = np.repeat(np.array([form for _, form in shape.runs], np.int64), counts)
    return np.stack((np.cumsum(sizes) - sizes, forms), 1)


def _put_run(target: Tensor, form: int, numbers: Tensor | None, octets: Tensor | None, scales: Tensor | None) -> None:
    """Pack columns of one form into the bytes [panels, panel_bytes]."""
    num_panels = len(target)
    if form in (IN_FP32, IN_BF16):
        assert numbers is not None
        together = PAIR if form == IN_BF16 else 1
        panels = numbers.view(num_panels, PANEL, -1, together).transpose(1, 2)
        target.view(torch.bfloat16 if form == IN_BF16 else torch.float32).view(panels.shape).copy_(panels)
        return
    assert octets is not None
    assert scales is not None
    num_groups = -(-octets.shape[1] // form)
    heads = target[:, : num_groups * VECTOR_BYTES].view(torch.float32).view(num_panels, num_groups, PANEL)
    heads.copy_(FP8_FACTOR * scales[:, :num_groups].reshape(num_panels, PANEL, num_groups).transpose(1, 2))
    body = target[:, num_groups * VECTOR_BYTES :].view(num_panels, -1, PANEL)
    body.copy_(octets.view(num_panels, PANEL, -1).transpose(1, 2))


def operand_dtypes(weights: Weights) -> tuple[DTypeLike, DTypeLike]:
    """The numpy types of the left operand of products with these weights, and of their sums. uint16 stands for int16,
    as int16 does for bf16.
    """
    if weights.packed.dtype in (np.int8, np.int64):
        return np.uint8 if knows_vnni() else np.uint16, np.int32
    if weights.packed.dtype == np.int16 and knows_bf16():
        return np.int16, np.float32
    return np.int8 if weights.packed.dtype == np.uint8 else np.float32, np.float32


def wide_size(weights: Weights) -> int:
    """Numbers of fp32 in `Operand.wide` with which no weights are widened, or unpacked, anew for each tile; 0 if none
    are.
    """
    if weights.packed.dtype == np.int64:
        return UNIT * int(weights.matrices[:, DEPTH].max()) // FLOAT_BYTES
    is_widened = operand_dtypes(weights)[0] == np.float32 and weights.packed.dtype != np.float32
    return UNIT * int(weights.matrices[:, DEPTH].max()) if widens_ahead() and is_widened else 0


def as_tensor(weights: Array) -> Tensor:
    """Weights in one of `DTYPES` as a tensor of the type that they stand for; shares their memory."""
    dtype = next(dtype for dtype, stored in DTYPES.items() if weights.dtype == stored)
    return torch.from_numpy(weights).view(dtype)


def as_array(weights: Tensor) -> Array:
    """The reverse of `as_tensor`."""
    array: Array = weights.view(torch.int16).numpy() if weights.itemsize == HALF_BYTES else weights.numpy()
    return array.view(DTYPES[weights.dtype])


def _pad_inputs(weight: Tensor, depth: int) -> Tensor:
    """`weight` [outputs, inputs] as [outputs, depth]; not a copy if it has so many inputs."""
    missing = depth - weight.shape[1]
    return torch.nn.functional.pad(weight, (0, missing)) if missing else weight


def _row_sums(weight: Tensor) -> Tensor:
    """int32 [rows] of bytes [rows, depth]. Some rows at a time, because torch widens before it adds."""
    at_once = max(1, _SUMMED_AT_ONCE // weight.shape[1])
    return torch.cat([rows.sum(1, dtype=torch.int32) for rows in torch.split(weight, at_once)])


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
