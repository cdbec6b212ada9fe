"""The inputs of a matrix, summed over the tokens of all calibration prompts."""

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

_MIN_BLOCK = 256
_NUM_BLOCKS = 8


def blocks_of_channels(num_channels: int) -> Iterator[slice]:
    """Blocks of channels. A symmetric matrix is computed block by block, each with itself and later ones only: with
    eight blocks that takes 9/16 of the work.
    """
    size = max(_MIN_BLOCK, -(-num_channels // _NUM_BLOCKS))
    return (slice(first, min(first + size, num_channels)) for first in range(0, num_channels, size))


class InputStatistics:
    """The largest and the mean absolute value of each input channel; with `needs_gram`, products of channels too.

    Attributes: `largest` [inputs]; `gram` [inputs, inputs], the sum of x xᵀ over tokens x, zeros without `needs_gram`;
    `num_tokens`.
    """

    def __init__(self, num_inputs: int, *, needs_gram: bool) -> None:
        self.largest = torch.zeros(num_inputs)
        self.num_tokens = 0
        self._gram = torch.zeros((num_inputs, num_inputs) if needs_gram else (0, 0))
        self._is_symmetric = True
        self._total = torch.zeros(num_inputs)

    def add(self, x: Tensor) -> None:
        """Count the tokens x [tokens, inputs]."""
        magnitudes = x.abs()
        torch.maximum(self.largest, magnitudes.amax(0), out=self.largest)
        self._total += magnitudes.sum(0)
        self.num_tokens += x.shape[0]
        if self._gram.numel():
            for block in blocks_of_channels(len(self._gram)):
                self._gram[block, block.start :].addmm_(x[:, block].t(), x[:, block.start :])
            self._is_symmetric = False

    @property
    def gram(self) -> Tensor:
        if not self._is_symmetric:  # below the diagonal nothing was added
            for block in blocks_of_channels(len(self._gram)):
                self._gram[block.stop :, block] = self._gram[block, block.stop :].t()
            self._is_symmetric = True
        return self._gram

    def divide(self, factors: Tensor) -> None:
        """Divide the inputs by factors [inputs], which were folded into what computes them."""
        self.largest /= factors
        self._total /= factors
        if self.gram.numel():
            self.gram.div_(factors).div_(factors[:, None])

    def clear(self) -> None:
        self.num_tokens = 0
        for numbers in (self.largest, self.gram, self._total):
            numbers.zero_()

    @staticmethod
    def mean_of(parts: Sequence["InputStatistics"]) -> Tensor:
        """The mean absolute values [inputs] of all tokens of the parts."""
        num_tokens = sum(part.num_tokens for part in parts)
        return reduce(torch.add, (part._total for part in parts)) / max(1, num_tokens)

    @classmethod
    def merged(cls, parts: Sequence["InputStatistics"]) -> "InputStatistics":
        """The statistics of all tokens of `parts`, which have the same channels."""
        total = cls(len(parts[0].largest), needs_gram=bool(parts[0].gram.numel()))
        for part in parts:
            torch.maximum(total.largest, part.largest, out=total.largest)
            total._gram += part.gram
            total._total += part._total
            total.num_tokens += part.num_tokens
        return total
