"""Row selection and row-wise argmax, sort and k-th largest. On CPU they use numpy, 2 to 20 times as fast as torch."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu import row_kernels
from engine.kernels.cpu.machine import why_no_loops


def take_rows(values: Tensor, rows: list[int]) -> Tensor:
    """The selected `rows`, which are distinct and ascending. If these are all rows, the result is `values` itself, so
    it must not be modified in place.
    """
    if len(rows) == values.shape[0]:
        return values
    return values.index_select(0, torch.tensor(rows, device=values.device))


def argmax(values: Tensor) -> Tensor:
    """Column of each row's largest value: [rows] int64, on the device of `values`."""
    if values.is_cpu:
        return torch.from_numpy(values.numpy().argmax(1))
    return values.argmax(1)


class Summary(NamedTuple):
    """Per row: the column of the largest value (the first one if several are equal), and log(sum(exp(row)))."""

    largest: Tensor  # [rows] int64
    normaliser: Tensor  # [rows] fp32


def summarise(values: Tensor) -> Summary:
    """Summary of fp32 values [rows, columns], by a compiled loop where the CPU allows it."""
    if values.is_cpu and values.stride(1) == 1 and why_no_loops(int8=False) is None:
        largest, normalisers = row_kernels.summarise(values.numpy())
        return Summary(torch.from_numpy(largest), torch.from_numpy(normalisers))
    return Summary(argmax(values), values.logsumexp(1))


def descending(values: Tensor) -> Tensor:
    """Each row sorted, largest first."""
    if values.is_cpu:
        return torch.from_numpy(-np.sort(-values.numpy(), axis=1))
    return values.sort(1, descending=True).values


def kth_largest(values: Tensor, ks: list[int]) -> Tensor:
    """The ks[row]-th largest value of each row (1 is the largest): [rows]."""
    if values.is_cpu:
        columns = [values.shape[1] - k for k in ks]
        parted = np.partition(values.numpy(), sorted(set(columns)), axis=1)
        return torch.from_numpy(parted[np.arange(len(ks)), columns])
    largest = values.topk(max(ks), dim=1).values
    return largest.gather(1, torch.tensor(ks, device=values.device)[:, None] - 1)[:, 0]
