"""Top-k, top-p and min-p as one threshold for each row: a token stays if its logit is at least that.

Order as in transformers: top-k, top-p over what top-k left, min-p. Tokens tied with the last one that stays, stay too,
which makes the result independent of how a sort breaks ties.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.selection import descending, kth_largest, take_rows


@dataclass(frozen=True, slots=True)
class Truncation:
    """Limits of each row, on the host. Off: top_k 0, top_p 1, min_p 0."""

    top_k: list[int]
    top_p: list[float]
    min_p: list[float]

    def thresholds(self, logits: Tensor) -> Tensor | None:
        """Lowest logit [num_rows] that stays; None if everything does. Logits are already divided by temperature."""
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
    wanted = torch.tensor([top_p[row] for row in rows], device=logits.device, dtype=torch.float64)
    ordered = descending(take_rows(logits, rows))
    weights = (ordered - ordered[:, :1]).exp_()
    weights *= ordered >= low[rows, None]
    mass = weights.cumsum(1, dtype=torch.float64)
    # Rounding may leave no column that reaches the whole mass: then the last one is meant.
    reached = (mass < wanted[:, None] * mass[:, -1:]).sum(1, keepdim=True).clamp_(max=logits.shape[1] - 1)
    low[rows] = torch.maximum(low[rows], ordered.gather(1, reached)[:, 0])
