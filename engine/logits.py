"""Logits: what a model computes of the rows to sample."""

from typing import NamedTuple

from torch import Tensor


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
