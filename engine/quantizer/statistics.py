"""The inputs of a matrix, summed over the tokens of all calibration prompts."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


class InputStatistics:
    """The largest and the mean absolute value of each input channel; with `needs_gram`, products of channels too.

    Attributes: `largest` [inputs]; `gram` [inputs, inputs], the sum of x xᵀ over tokens x, zeros without `needs_gram`;
    `num_tokens`.
    """

    def __init__(self, num_inputs: int, *, needs_gram: bool) -> None:
        self.largest = torch.zeros(num_inputs)
        self.gram = torch.zeros((num_inputs, num_inputs) if needs_gram else (0, 0))
        self.num_tokens = 0
        self._total = torch.zeros(num_inputs)

    def add(self, x: Tensor) -> None:
        """Count the tokens x [tokens, inputs]."""
        magnitudes = x.abs()
        torch.maximum(self.largest, magnitudes.amax(0), out=self.largest)
        self._total += magnitudes.sum(0)
        self.num_tokens += x.shape[0]
        if self.gram.numel():
            self.gram.addmm_(x.t(), x)

    def divide(self, factors: Tensor) -> None:
        """Divide the inputs by factors [inputs], which were folded into what computes them."""
        self.largest /= factors
        self._total /= factors
        if self.gram.numel():
            self.gram.div_(factors).div_(factors[:, None])

    def clear(self) -> None:
        """Forget all tokens."""
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
        """Those of all tokens of the parts, which count the same channels."""
        total = cls(len(parts[0].largest), needs_gram=bool(parts[0].gram.numel()))
        for part in parts:
            torch.maximum(total.largest, part.largest, out=total.largest)
            total.gram += part.gram
            total._total += part._total
            total.num_tokens += part.num_tokens
        return total
