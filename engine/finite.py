"""Detection of NaN and infinity in weights, and in the results of a step: a residual that is not finite stays so in all
later layers, so checking the last hidden states is enough.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mesh.domain.tokens import PromptLogprob, SampledToken

_NONE: frozenset[int] = frozenset()


def is_finite(values: Tensor) -> bool:
    """True if all values are finite. Their sum is checked first: it is finite only if all of them are."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def why_not_finite(values: Tensor, name: str) -> str:
    """The error for a tensor of a checkpoint, not all of whose values are finite."""
    count = int((~torch.isfinite(values)).sum())
    hint = "or too large for float16: try bfloat16" if values.dtype is torch.float16 else "the checkpoint is broken"
    return f"{count} of {values.numel()} numbers of tensor {name} are NaN or infinite: {hint}"


def items_not_finite(hidden: Tensor, starts: Sequence[int], total: float) -> frozenset[int]:
    """Indices of the items whose hidden states are not finite; item i has rows [starts[i], starts[i + 1]).

    `total` is `sum_of(hidden)`, read with other results of the step. The rows are read only if it is not finite.
    """
    if math.isfinite(total):
        return _NONE
    finite = torch.isfinite(hidden).all(1).tolist()
    return frozenset(item for item, (start, stop) in enumerate(pairwise(starts)) if not all(finite[start:stop]))


def sum_of(hidden: Tensor) -> Tensor:
    """The sum of all values, on their device: finite only if all of them are."""
    return hidden.sum(dtype=torch.float32)


def scores_are_finite(scored: Sequence[SampledToken] | Sequence[PromptLogprob]) -> bool:
    """False if a log-prob is not finite: then a row of logits, or its sum of exponentials, was not finite."""
    return all(token.logprob is not None and math.isfinite(token.logprob) for token in scored)
