"""Rounds matrices to int8, with a scale for each output."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.kernels.cpu.machine import INT8_LEVELS

_ELEMENTS_AT_ONCE = 2**18  # a megabyte in fp32
_TINY = 1e-20  # minimum scale, for rows of zeros


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's operations in the calling thread: threads of small operations mostly wait for each other."""
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
