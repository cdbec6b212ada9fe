"""The numbers that a matrix can be rounded to: int4 in groups, int8 and fp8 by output; each to its nearest number.

Scales are rounded to the dtype in which they are stored before anything is divided by them, so a written matrix means
what was computed here, to the bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.models.rounding import round_to_int8
from engine.quantized_formats.matrix import QuantizedMatrix

RoundRows = Callable[[Tensor], Tensor]
"""Rounds activations [tokens, width]."""
INT4_MIN, INT4_MAX = -8, 7
_INT4_SPAN = 7.5
"""Half the distance of both ends of int4: the largest number of a group is rounded by at most half a step."""
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_INT8_MAX = 127.0


def int4_scales(weight: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Scales [outputs, groups] that keep the largest number of each group, as `dtype` can store them, in fp32."""
    largest = weight.reshape(len(weight), -1, group_size).abs().amax(2)
    return storable(largest / _INT4_SPAN, dtype)


def storable(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as `dtype` can store them, in fp32; 1 for groups of zeros."""
    stored = scales.to(dtype).float()
    return torch.where(stored == 0, 1.0, stored)


def round_int4(weight: Tensor, scales: Tensor) -> QuantizedMatrix:
    """Round each number of `weight` [outputs, inputs] to the nearest multiple of the scale of its group."""
    group_size = weight.shape[1] // scales.shape[1]
    steps = weight / scales.repeat_interleave(group_size, 1)
    return QuantizedMatrix(steps.round_().clamp_(INT4_MIN, INT4_MAX).to(torch.int8), scales)


def round_int8(weight: Tensor) -> QuantizedMatrix:
    values, scales = round_to_int8(weight)
    return QuantizedMatrix(values, scales[:, None])


def round_fp8(weight: Tensor) -> QuantizedMatrix:
    scales = storable(weight.abs().amax(1, keepdim=True) / _FP8_MAX, torch.float32)
    return QuantizedMatrix((weight / scales).clamp_(-_FP8_MAX, _FP8_MAX).to(_FP8), scales)


def int8_rows(x: Tensor) -> Tensor:
    """Activations [tokens, width] after rounding to int8, with a scale for each token."""
    scales = storable(x.abs().amax(1, keepdim=True) / _INT8_MAX, torch.float32)
    return (x / scales).round_().mul_(scales)


def fp8_rows(x: Tensor) -> Tensor:
    """Activations [tokens, width] after rounding to fp8, with a scale for each token."""
    return round_fp8(x).dequantized()
