"""Rounds matrices to int8, with a scale for each output or group, and to int4, whose groups have a scale and a zero, or
steps of int8.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.cpu.machine import EIGHT_BITS_ZERO, INT8_LEVELS, MAX_STEP, STEP_GROUP

INT4_GROUP = 32
"""Inputs that share a scale in matrices that are rounded to int4."""
_INT4_LEVELS = 15
_ELEMENTS_AT_ONCE = 2**18  # a megabyte in fp32
_TINY = 1e-20  # minimum scale, for rows of zeros


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's operations in the calling thread: in small operations threads mostly wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `weight` [outputs, inputs] rounded to int8, and a scale for each output in fp32. Works on some rows at a
    time, which stay in the cache and need little memory.
    """
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    rounded = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    rows_at_once = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
    with one_thread():
        for first in range(0, weight.shape[0], rows_at_once):
            rows = slice(first, first + rows_at_once)
            scales[rows] = weight[rows].abs().amax(1).to(torch.float32).clamp_(min=_TINY).div_(INT8_LEVELS)
            rounded[rows] = torch.round(weight[rows] / scales[rows, None])
    return rounded, scales


def round_to_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `weight` [outputs, inputs] rounded to 0 to 15 as uint8, and for each group of inputs a scale in fp32 (a
    number of fp16) and a zero as uint8, [outputs, groups]. The last group may be narrower.
    """
    rounded, scales = _empty_groups(weight, INT4_GROUP)
    zeros = torch.empty(scales.shape, dtype=torch.uint8)
    for rows, groups in _some_groups(weight, INT4_GROUP):
        low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
        scales[rows] = ((high - low) / _INT4_LEVELS).clamp_(min=_TINY).half().float()
        zeros[rows] = torch.round(-low / scales[rows].clamp(min=_TINY)).clamp_(0, _INT4_LEVELS)
        levels = torch.round(groups / scales[rows, :, None].clamp(min=_TINY)) + zeros[rows, :, None]
        rounded[rows] = levels.clamp_(0, _INT4_LEVELS).flatten(1)[:, : weight.shape[1]]
    return rounded, scales, zeros


def round_to_steps(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `weight` [outputs, inputs], of whole groups, rounded to 0 to 15 as uint8; a scale for each output in fp32,
    that of int8; and for each group of inputs, as numbers of int8 [outputs, groups], a step as uint8 and the low end. A
    group has the step that rounds less: the whole number below a fifteenth of its range, or that above.
    """
    rounded, scales = _empty_groups(weight, STEP_GROUP)
    steps, lows = torch.empty(scales.shape, dtype=torch.uint8), torch.empty(scales.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for rows, groups in _some_groups(weight, STEP_GROUP):
        scales[rows] = groups.abs().amax((1, 2)).clamp_(min=_TINY).div_(INT8_LEVELS)
        groups = groups / scales[rows, None, None]
        smaller = groups.amax(2, keepdim=True).sub_(groups.amin(2, keepdim=True)).div_(_INT4_LEVELS).floor_()
        best, other = (_in_steps(groups, (smaller + more).clamp_(1, MAX_STEP)) for more in range(2))
        is_better = other.errors < best.errors
        levels, step, low, _ = (torch.where(is_better, *pair) for pair in zip(other, best, strict=True))
        rounded[rows] = levels.flatten(1)
        steps[rows], lows[rows] = step[..., 0], low[..., 0]
    return rounded, scales, steps, lows


class _Stepped(NamedTuple):
    """Groups [rows, groups, group] in steps; of each group, [rows, groups, 1], the step, the low end and the sum of
    squared errors.
    """

    levels: Tensor
    steps: Tensor
    lows: Tensor
    errors: Tensor


def _in_steps(groups: Tensor, steps: Tensor) -> _Stepped:
    middle = groups.amax(2, keepdim=True).add_(groups.amin(2, keepdim=True)).div_(2)
    lows = middle.sub_(steps * (_INT4_LEVELS / 2)).round_()
    lows = torch.minimum(lows.clamp_(min=-INT8_LEVELS - 1), INT8_LEVELS - _INT4_LEVELS * steps)
    levels = ((groups - lows) / steps).round_().clamp_(0, _INT4_LEVELS)
    errors = (levels * steps).add_(lows).sub_(groups).square_().sum(2, keepdim=True)
    return _Stepped(levels, steps, lows, errors)


def round_to_int8_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `weight` [outputs, inputs] rounded to 1 to 255 as uint8, and for each group of inputs a scale in fp32 (a
    number of fp16) and the zero, 128, as uint8, [outputs, groups]. The last group may be narrower.
    """
    rounded, scales = _empty_groups(weight, group)
    for rows, groups in _some_groups(weight, group):
        scales[rows] = (groups.abs().amax(2) / INT8_LEVELS).clamp_(min=_TINY).half().float()
        levels = torch.round(groups / scales[rows, :, None].clamp(min=_TINY)).clamp_(-INT8_LEVELS, INT8_LEVELS)
        rounded[rows] = (levels + EIGHT_BITS_ZERO).flatten(1)[:, : weight.shape[1]]
    return rounded, scales, torch.full(scales.shape, EIGHT_BITS_ZERO, dtype=torch.uint8)


def _empty_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Memory for rounded numbers, and for a scale of each group."""
    num_outputs, num_inputs = weight.shape
    return torch.empty(weight.shape, dtype=torch.uint8), torch.empty(num_outputs, -(-num_inputs // group))


def _some_groups(weight: Tensor, group: int) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time, and their numbers in fp32 [rows, groups, group], padded with zeros."""
    num_outputs, num_inputs = weight.shape
    rows_at_once = max(1, _ELEMENTS_AT_ONCE // num_inputs)
    with one_thread():
        for first in range(0, num_outputs, rows_at_once):
            rows = slice(first, first + rows_at_once)
            padded = torch.nn.functional.pad(weight[rows].float(), (0, -num_inputs % group))
            yield rows, padded.view(len(padded), -1, group)
