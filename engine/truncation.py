"""Top-k, top-p and min-p as one threshold for each row: a token stays if its logit is at least that.

Order as in transformers: top-k, top-p over what top-k left, min-p. Tokens tied with the last one that stays, stay too,
which makes the result independent of how a sort breaks ties.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Nearly all of a model's probability lies in so few tokens; a row where it does not is sorted whole.
_FIRST_CANDIDATES = 1024


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
    ks = torch.tensor([limits[row] for row in rows], device=logits.device)
    largest = logits[rows].topk(int(ks.max()), dim=1).values
    low[rows] = largest.gather(1, ks[:, None] - 1)[:, 0]


def _raise_to_top_p(low: Tensor, logits: Tensor, top_p: list[float]) -> None:
    """Raise each limited row's threshold to the logit at which the kept probability first reaches top_p."""
    rows = torch.tensor([row for row, p in enumerate(top_p) if p < 1.0], device=logits.device)
    wanted = torch.tensor([p for p in top_p if p < 1.0], device=logits.device, dtype=torch.float64)
    size = min(_FIRST_CANDIDATES, logits.shape[1])
    while rows.numel():
        left = logits[rows]
        left = left.masked_fill(left < low[rows, None], float("-inf"))
        highest = left.amax(1, keepdim=True)
        total = (left - highest).exp().sum(1, dtype=torch.float64)
        candidates = left.topk(size, dim=1).values
        mass = (candidates - highest).exp().to(torch.float64).cumsum(1) / total[:, None]
        reached = mass >= wanted[:, None]
        done = reached[:, -1] if size < logits.shape[1] else torch.ones_like(reached[:, -1])
        # Without rounding the whole row always reaches; the last candidate stands in.
        index = torch.where(reached.any(1), reached.to(torch.int8).argmax(1), size - 1)
        found = candidates.gather(1, index[:, None])[:, 0]
        low[rows[done]] = torch.maximum(low[rows[done]], found[done])
        rows, wanted, size = rows[~done], wanted[~done], logits.shape[1]
