"""Logits, and the operations of sampling on whole rows of them. RowMath is what the sampler needs; DeviceRows does it
with torch, on any device, and reads nothing back. `host_rows.py` has compiled loops for the CPU.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from engine.device_copies import Arrays, Tensors
from engine.sampling.truncation import Truncation, take_rows
from mesh.domain.request import SamplingParams

_DRAW_BLOCK = 256


class Summary(NamedTuple):
    """Per row: the column of the largest value (the first one if several are equal), log(sum(exp(row))), and the
    largest value's log-prob.
    """

    largest: Tensor  # [rows] int64
    normaliser: Tensor  # [rows] fp32
    logprob: Tensor  # [rows] fp32


class Logits(NamedTuple):
    """fp32 logits [rows, vocab_size], and their summary if the model has computed it."""

    values: Tensor
    summary: Summary | None = None


class RandomRows(NamedTuple):
    """Rows whose tokens are random: their numbers, parameters, and random numbers in [0, 1)."""

    rows: Sequence[int]
    params: Sequence[SamplingParams]
    uniforms: NDArray[np.float64]


class Drawing(Protocol):
    """A draw of tokens for some rows of logits [num_seqs, vocab_size]."""

    @property
    def arrays(self) -> Arrays:
        """The arrays that `tokens` needs on the device of the logits; "drawing" are the rows."""
        ...

    def tokens(self, logits: Tensor, tensors: Tensors) -> Tensor:
        """A token for each of the rows, independent of other rows. `tensors`: `arrays`, on the device."""
        ...


class RowMath(Protocol):
    """Plug point: HostRows, DeviceRows. Values are fp32 [rows, columns]."""

    def summarise(self, values: Tensor) -> Summary: ...

    def argmax(self, values: Tensor) -> Tensor:
        """Column of each row's largest value: [rows] int64."""
        ...

    def top(self, values: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest values of some rows, in falling order, and their columns: [rows, count], fp32 and int64. There
        must be as many columns. Of equal values the one in the first column comes first, so the result does not depend
        on `count` or on other rows.
        """
        ...

    def copied(self, values: Tensor, masks: Tensors) -> Tensor:
        """A copy, in which tokens that masks (TokenMasks.take) do not allow are minus infinity."""
        ...

    def drawing(self, wanted: RandomRows, vocab_size: int) -> Drawing: ...


class DeviceRows:
    """RowMath of tensors on any device."""

    def summarise(self, values: Tensor) -> Summary:
        (highest, largest), normaliser = values.max(1), values.logsumexp(1)
        return Summary(largest, normaliser, highest - normaliser)

    def argmax(self, values: Tensor) -> Tensor:
        return values.argmax(1)

    def top(self, values: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        values = take_rows(values, rows)
        found, columns = values.topk(count, dim=1)  # ties in any order, and any of those with the last one
        last, places = found[:, -1:], torch.arange(count, device=values.device)
        # The first columns tied with the last one. fp32 tells columns below 2^24 apart.
        negative = -torch.arange(values.shape[1], dtype=torch.float32, device=values.device)
        tied = torch.where(values == last, negative, float("-inf")).topk(count, dim=1).indices
        num_above = (found > last).sum(1, keepdim=True)
        tied = tied.gather(1, (places - num_above).clamp_(min=0))
        columns = torch.where(places < num_above, columns, tied).sort(1).values
        found, order = values.gather(1, columns).sort(stable=True, dim=1, descending=True)
        return found, columns.gather(1, order)

    def copied(self, values: Tensor, masks: Tensors) -> Tensor:
        values = values.clone()
        if masks:
            rows, bits = masks["masked"], masks["mask_bits"]
            places = torch.arange(8, dtype=torch.uint8, device=values.device)
            is_allowed = (bits[:, :, None] >> places & 1).view(len(bits), -1)[:, : values.shape[1]]
            values[rows] = values[rows].masked_fill_(is_allowed == 0, float("-inf"))
        return values

    def drawing(self, wanted: RandomRows, vocab_size: int) -> Drawing:
        return _DeviceDrawing(wanted, vocab_size)


class _DeviceDrawing:
    def __init__(self, wanted: RandomRows, vocab_size: int) -> None:
        self._truncation = Truncation(wanted.params, vocab_size)
        self.arrays: Arrays = {
            "drawing": np.array(wanted.rows, np.int64),
            "temperature": np.array([p.temperature for p in wanted.params], np.float32),
            "uniform": wanted.uniforms,
            **self._truncation.arrays,
        }

    def tokens(self, logits: Tensor, tensors: Tensors) -> Tensor:
        scaled = take_rows(logits, tensors["drawing"]) / tensors["temperature"][:, None]
        keep_mask = self._truncation.keep_mask(scaled, tensors)
        highest = scaled.amax(1, keepdim=True)
        weights = scaled.sub_(highest).exp_()
        if keep_mask is not None:
            weights *= keep_mask
        return inverse_cdf(weights, tensors["uniform"])


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse transform sampling: per row, the first token at which the cumulative weight exceeds uniform * total.

    weights: [rows, vocab_size], not normalised; uniforms: [rows] float64. Sums of blocks are searched first, then a
    single block, which avoids a cumulative sum over the vocabulary.
    """
    num_rows, vocab_size = weights.shape
    blocks = pad(weights, (0, -vocab_size % _DRAW_BLOCK)).view(num_rows, -1, _DRAW_BLOCK)
    cumulative = blocks.sum(2).cumsum(1, dtype=torch.float64)  # [rows, num_blocks]
    target = uniforms[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    chosen = blocks[torch.arange(num_rows, device=weights.device), block[:, 0]]  # [rows, _DRAW_BLOCK]
    within = _first_above(chosen.to(torch.float64).cumsum(1), target - before)
    return (block * _DRAW_BLOCK + within)[:, 0]


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index [rows, 1] of the first value above the target, or of the last increase if rounding left no value above."""
    first = (cumulative <= target).sum(1, keepdim=True)
    last = cumulative.argmax(1, keepdim=True)  # the first of equal maxima
    return torch.minimum(first, last)
