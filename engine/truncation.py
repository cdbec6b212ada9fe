"""Truncation of the distribution: top-k, top-p and min-p as one threshold per row, then typical-p.

Order as in transformers: top-k; top-p over the tokens that top-k kept; min-p; typical-p over the tokens that these
kept. Tokens tied with the last kept token are kept, too, so the result does not depend on how a sort breaks ties.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.selection import descending, kth_largest, take_rows


@dataclass(frozen=True, slots=True)
class Truncation:
    """Limits per row, on the host. Off: top_k 0, top_p 1, min_p 0, typical_p 1."""

    top_k: list[int]
    top_p: list[float]
    min_p: list[float]
    typical_p: list[float]

    def keep_mask(self, logits: Tensor) -> Tensor | None:
        """1 for tokens to keep, 0 for others, in the shape of `logits`; None if all tokens are kept.

        The logits are already divided by the temperature.
        """
        low = self.thresholds(logits)
        mask = None if low is None else torch.ge(logits, low[:, None], out=torch.empty_like(logits))
        if any(p < 1.0 for p in self.typical_p):
            mask = torch.ones_like(logits) if mask is None else mask
            _keep_typical(mask, logits, self.typical_p)
        return mask

    def thresholds(self, logits: Tensor) -> Tensor | None:
        """Lowest logit [num_rows] that top-k, top-p and min-p keep; None if they keep all tokens."""
        vocab_size = logits.shape[1]
        limits = [k if 0 < k < vocab_size else vocab_size for k in self.top_k]
        by_k = any(k < vocab_size for k in limits)
        by_p = any(p < 1.0 for p in self.top_p)
        by_min = any(p > 0.0 for p in self.min_p)
        if not (by_k or by_p or by_min):
            return None
        low = torch.full(logits.shape[:1], float("-inf"), device=logits.device)
        if by_k:
            _raise_to_top_k(low, logits, limits)
        if by_p:
            _raise_to_top_p(low, logits, self.top_p)
        if by_min:
            minimum = torch.tensor(self.min_p, device=logits.device)
            low = torch.maximum(low, logits.amax(1) + minimum.log())  # log(0) = -inf: off
        return low


def _raise_to_top_k(low: Tensor, logits: Tensor, limits: list[int]) -> None:
    """Set each limited row's threshold to its k-th largest logit."""
    rows = [row for row, k in enumerate(limits) if k < logits.shape[1]]
    low[rows] = kth_largest(take_rows(logits, rows), [limits[row] for row in rows])


def _raise_to_top_p(low: Tensor, logits: Tensor, top_p: list[float]) -> None:
    """Raise each limited row's threshold to the logit at which the kept probability first reaches top_p."""
    rows = [row for row, p in enumerate(top_p) if p < 1.0]
    limits = torch.tensor([top_p[row] for row in rows], device=logits.device, dtype=torch.float64)
    ordered = descending(take_rows(logits, rows))
    weights = (ordered - ordered[:, :1]).exp_()
    weights *= ordered >= low[rows, None]
    mass = weights.cumsum(1, dtype=torch.float64)
    # Rounding may leave no column that reaches the total mass; then the last column is used.
    reached = (mass < limits[:, None] * mass[:, -1:]).sum(1, keepdim=True).clamp_(max=logits.shape[1] - 1)
    low[rows] = torch.maximum(low[rows], ordered.gather(1, reached)[:, 0])


def _keep_typical(mask: Tensor, logits: Tensor, typical_p: list[float]) -> None:
    """Keep, in each limited row, the tokens whose information is closest to the row's entropy, until their probability
    reaches typical_p (locally typical sampling, Meister et al. 2023).
    """
    rows = [row for row, p in enumerate(typical_p) if p < 1.0]
    limits = torch.tensor([typical_p[row] for row in rows], device=logits.device, dtype=torch.float64)
    logprobs = take_rows(logits, rows).masked_fill(take_rows(mask, rows) == 0, float("-inf")).log_softmax(1)
    weights = logprobs.exp()
    entropy = -(weights * logprobs).nansum(1, keepdim=True)  # removed tokens give 0 * -inf = NaN
    distance = (logprobs + entropy).abs_()
    ordered, order = distance.sort(1)
    mass = weights.gather(1, order).cumsum(1, dtype=torch.float64)
    reached = (mass < limits[:, None] * mass[:, -1:]).sum(1, keepdim=True).clamp_(max=logits.shape[1] - 1)
    mask[rows] *= distance <= ordered.gather(1, reached)
