"""Summed: a part of a layer that several ranks compute together."""

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from engine.models.layer import Mlp
    from engine.models.linear import LinearLayer, Rows
    from engine.models.rank_group import SummingGroup


class Summed:
    """A projection or an MLP of which each rank computes a part: the sum of the parts."""

    def __init__(self, part: "LinearLayer | Mlp", ranks: "SummingGroup") -> None:
        self.ops = part.ops
        self._part = part
        self._ranks = ranks

    def __call__(self, x: "Rows") -> Tensor:
        return self._ranks.sum(self._part(x))

    def add_to(self, residual: Tensor, x: "Rows") -> Tensor:
        return residual + self(x)
