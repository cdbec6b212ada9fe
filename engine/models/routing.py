"""The choice of experts: which ones process a row, and by which shares their results are added up.

The compiled decoder does the same in engine/kernels/cpu/routing.py.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.experts_config import ExpertsConfig


class Router:
    """Chooses experts. `weight`: [num_experts, hidden_size]; `choice_bias`: [num_experts] in fp32; `bias`: as that;
    `factors` [num_experts]: of their shares.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        weight: Tensor,
        choice_bias: Tensor | None = None,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> None:
        self._config = config
        self.weight = weight
        self._choice_bias = choice_bias
        self._bias = bias
        self._factors = factors

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [rows, hidden_size] -> the experts of each row, and the shares of their results: both [rows, top_k]."""
        facts = self._config
        outputs = F.linear(x.to(self.weight.dtype), self.weight, self._bias)
        if facts.scoring == "sparse-mixer":
            chosen, shares = _mix_sparsely(outputs.to(torch.float32), facts)
        else:
            chosen, shares = self._choose(outputs)
        if self._factors is not None:
            shares = shares * self._factors[chosen]
        return chosen, shares.to(x.dtype)

    def _choose(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        facts = self._config
        if facts.scoring == "sigmoid":
            scores = outputs.to(torch.float32).sigmoid()
        else:
            scores = outputs.softmax(-1, dtype=torch.float32)
        if self._choice_bias is not None:
            ranked = (outputs.to(torch.float32) if facts.biases_outputs else scores) + self._choice_bias
        else:
            ranked = scores if facts.num_groups > 1 else outputs  # of outputs fewer are equal: scores round to 1
        if facts.num_groups > 1:
            ranked = _without_lower_groups(ranked, facts)
        chosen = ranked.topk(facts.top_k, -1).indices
        shares = scores.gather(-1, chosen)
        if facts.normalised:
            shares = shares / (shares.sum(-1, keepdim=True) + facts.share_floor)
        return chosen, shares if facts.routed_scale == 1.0 else shares * facts.routed_scale


def _without_lower_groups(ranked: Tensor, facts: ExpertsConfig) -> Tensor:
    """Rank experts last unless their group is one of the `top_groups` (DeepSeek-AI 2024)."""
    grouped = ranked.view(len(ranked), facts.num_groups, -1)
    best = grouped.topk(facts.group_best, -1).values.sum(-1).topk(facts.top_groups, -1).indices
    is_lower = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(is_lower[..., None], -torch.inf).flatten(1)


def _mix_sparsely(outputs: Tensor, facts: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """SparseMixer (Liu et al. 2024), as it is without training: one expert after the other has the highest output of
    those left; its share is its softmax over those of them whose outputs are close to it.
    """
    left, all_chosen, shares = outputs, [], []
    for _ in range(facts.top_k):
        peak, chosen = left.max(-1, keepdim=True)
        is_far = peak - outputs > facts.mixer_range * torch.maximum(outputs.abs(), peak)
        close = left.masked_fill(is_far, -torch.inf)
        shares.append(close.softmax(-1).gather(-1, chosen))
        all_chosen.append(chosen)
        left = left.scatter(-1, chosen, -torch.inf)
    return torch.cat(all_chosen, -1), torch.cat(shares, -1)
