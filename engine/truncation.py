"""Which tokens may be drawn: top-k, top-p and min-p as one threshold for each row, then typical-p.

Order as in transformers: top-k, top-p over what top-k left, min-p, typical-p over what they left. Tokens tied with the
last one that stays, stay too, which makes the result independent of how a sort breaks ties.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.selection import descending, kth_largest, take_rows


@dataclass(frozen=True, slots=True)
class Truncation:
    """Limits of each row, on the host. Off: top_k 0, top_p 1, min_p 0, typical_p 1."""

    top_k: list[int]
    top_p: list[float]
    min_p: list[float]
    typical_p: list[float]

    def kept(self, logits: Tensor) -> Tensor | None:
        """1 for tokens that stay, 0 for others, in the shape of `logits`, which are already divided by temperature;
        None if everything stays."""
        low = self.thresholds(logits)
        stays = None if low is None else torch.ge(logits, low[:, None], out=torch.empty_like(logits))
        if any(p < 1.0 for p in self.typical_p):
            stays = torch.ones_like(logits) if stays is None else stays
            _keep_typical(stays, logits, self.typical_p)
        return stays

    def thresholds(self, logits: Tensor) -> Tensor | None:
        """Lowest logit [num_rows] that top-k, top-p and min-p leave; None if they leave everything."""
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


def _keep_typical(stays: Tensor, logits: Tensor, typical_p: list[float]) -> None:
    """Leave each limited row the tokens whose information is nearest to its entropy, until their probability reaches
    typical_p (locally typical sampling, Meister et al. 2023)."""
    rows = [row for row, p in enumerate(typical_p) if p < 1.0]
    wanted = torch.tensor([typical_p[row] for row in rows], device=logits.device, dtype=torch.float64)
    logprobs = take_rows(logits, rows).masked_fill(take_rows(stays, rows) == 0, float("-inf")).log_softmax(1)
    weights = logprobs.exp()
    entropy = -(weights * logprobs).nansum(1, keepdim=True)  # of tokens that are out, 0 * -inf
    distance = (logprobs + entropy).abs_()
    ordered, order = distance.sort(1)
    mass = weights.gather(1, order).cumsum(1, dtype=torch.float64)
    reached = (mass < wanted[:, None] * mass[:, -1:]).sum(1, keepdim=True).clamp_(max=logits.shape[1] - 1)
    stays[rows] *= distance <= ordered.gather(1, reached)
