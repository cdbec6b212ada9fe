"""Truncation: top-k, top-p and min-p as one threshold per row, then typical-p.

The order is that of transformers: top-k; top-p over the tokens that top-k kept; min-p; typical-p over the tokens that
these kept. Tokens tied with the last kept token are kept, too, so the result does not depend on how a sort breaks ties.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device_copies import Tensors
from mesh.domain.request import SamplingParams


class Truncation:
    """The limits of some rows. Off: top_k 0, top_p 1, min_p 0, typical_p 1."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int) -> None:
        limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        ks = {row: k for row, k in enumerate(limits) if k < vocab_size}
        top_ps = {row: p.top_p for row, p in enumerate(params) if p.top_p < 1.0}
        typical_ps = {row: p.typical_p for row, p in enumerate(params) if p.typical_p < 1.0}
        self._largest_k = max(ks.values(), default=0)
        self.arrays: dict[str, NDArray[Any]] = {}
        """The limits as `keep_mask` needs them on the device; only those that are on."""
        if ks:
            self.arrays |= {"k_rows": _rows(ks), "ks": np.array([*ks.values()], np.int64)}
        if top_ps:
            self.arrays |= {"top_p_rows": _rows(top_ps), "top_ps": np.array([*top_ps.values()], np.float64)}
        if any(p.min_p > 0.0 for p in params):
            self.arrays["min_ps"] = np.array([p.min_p for p in params], np.float32)
        if typical_ps:
            ps = np.array([*typical_ps.values()], np.float64)
            self.arrays |= {"typical_rows": _rows(typical_ps), "typical_ps": ps}

    def keep_mask(self, logits: Tensor, limits: Tensors) -> Tensor | None:
        """1 for tokens to keep, 0 for others, in the shape of `logits`; None if all tokens are kept. `limits` are
        `arrays` on the device of the logits, which are already divided by the temperature.
        """
        low = self.thresholds(logits, limits)
        mask = None if low is None else torch.ge(logits, low[:, None], out=torch.empty_like(logits))
        if "typical_ps" in limits:
            mask = torch.ones_like(logits) if mask is None else mask
            _keep_typical(mask, logits, limits["typical_rows"], limits["typical_ps"])
        return mask

    def thresholds(self, logits: Tensor, limits: Tensors) -> Tensor | None:
        """Lowest logit [num_rows] that top-k, top-p and min-p keep; None if they keep all tokens."""
        if not limits.keys() & {"ks", "top_ps", "min_ps"}:
            return None
        low = torch.full(logits.shape[:1], float("-inf"), device=logits.device)
        if "ks" in limits:
            rows = limits["k_rows"]
            largest = take_rows(logits, rows).topk(self._largest_k, dim=1).values
            low[rows] = largest.gather(1, limits["ks"][:, None] - 1)[:, 0]
        if "top_ps" in limits:
            _raise_to_top_p(low, take_rows(logits, limits["top_p_rows"]).sort(1, descending=True).values, limits)
        if "min_ps" in limits:
            low = torch.maximum(low, logits.amax(1) + limits["min_ps"].log())  # log(0) = -inf: off
        return low


def _rows(values: dict[int, Any]) -> NDArray[np.int64]:
    return np.array([*values], np.int64)


def _raise_to_top_p(low: Tensor, ordered: Tensor, limits: Tensors) -> None:
    """Raise each limited row's threshold to the logit at which the kept probability first reaches top_p. `ordered`:
    the limited rows, each sorted, largest first.
    """
    rows = limits["top_p_rows"]
    weights = (ordered - ordered[:, :1]).exp_()
    weights *= ordered >= low[rows, None]
    reached = _first_reaching(weights, limits["top_ps"])
    low[rows] = torch.maximum(low[rows], ordered.gather(1, reached)[:, 0])


def _keep_typical(mask: Tensor, logits: Tensor, rows: Tensor, typical_ps: Tensor) -> None:
    """Keep, in each limited row, the tokens whose information is closest to the row's entropy, until their probability
    reaches typical_p (locally typical sampling, Meister et al. 2023).
    """
    logprobs = take_rows(logits, rows).masked_fill(take_rows(mask, rows) == 0, float("-inf")).log_softmax(1)
    weights = logprobs.exp()
    entropy = -(weights * logprobs).nansum(1, keepdim=True)  # removed tokens give 0 * -inf = NaN
    distance = (logprobs + entropy).abs_()
    ordered, order = distance.sort(1)
    reached = _first_reaching(weights.gather(1, order), typical_ps)
    mask[rows] *= distance <= ordered.gather(1, reached)


def _first_reaching(weights: Tensor, shares: Tensor) -> Tensor:
    """Per row, the first column [rows, 1] up to which the weights are the given share of their sum."""
    mass = weights.cumsum(1, dtype=torch.float64)
    # Rounding may leave no column that reaches the total mass; then the last column is used.
    return (mass < shares[:, None] * mass[:, -1:]).sum(1, keepdim=True).clamp_(max=weights.shape[1] - 1)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """The selected `rows`, which are distinct and ascending. If these are all rows, the result is `values` itself, so
    it must not be modified in place.
    """
    return values if len(rows) == values.shape[0] else values.index_select(0, rows)
