"""What follows attention in a layer: a gated MLP, a plain one, or a mixture of experts."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.facts import ExpertsConfig
from engine.models.layers import Activation
from engine.models.ops import LinearLayer, Ops, Rows


class Mlp(Protocol):
    """Plug point of a layer."""

    def __call__(self, x: Rows, /) -> Tensor:
        """[rows, hidden_size] -> the same shape."""
        ...

    def add_to(self, residual: Tensor, x: Rows, /) -> Tensor:
        """`residual` plus the result; may reuse its memory."""
        ...


class DenseMlp:
    """down(activation(gate) * up), or down(activation(up)) if it is not `gated`."""

    def __init__(self, up: LinearLayer, down: LinearLayer, activation: Activation, ops: Ops, *, gated: bool) -> None:
        self._up = up
        self._down = down
        self._activation = activation
        self._bend = ops.gated if gated else ops.activated

    def __call__(self, x: Rows) -> Tensor:
        """See Mlp."""
        return self._down(self._bend(self._activation, self._up(x)))

    def add_to(self, residual: Tensor, x: Rows) -> Tensor:
        """See Mlp."""
        return self._down.add_to(residual, self._bend(self._activation, self._up(x)))


class Experts:
    """A mixture of experts (Shazeer et al. 2017): each row goes through `top_k` of them. The router is never quantised.

    A row's result does not depend on its batch: experts are taken in order, each with all of its rows.
    """

    def __init__(self, config: ExpertsConfig, router: Tensor, experts: list[DenseMlp], ops: Ops) -> None:
        self._config = config
        self._router = router  # [num_experts, hidden_size]
        self._experts = experts
        self._ops = ops

    def __call__(self, x: Rows) -> Tensor:
        """See Mlp."""
        values = self._ops.values(x)
        weights = self._route(values)  # [rows, num_experts]
        total = torch.zeros_like(values)
        for expert in weights.any(0).nonzero()[:, 0].tolist():
            rows = weights[:, expert].nonzero()[:, 0]
            result = self._experts[expert](self._ops.rows(values[rows]))
            total.index_add_(0, rows, result * weights[rows, expert, None])
        return total

    def add_to(self, residual: Tensor, x: Rows) -> Tensor:
        """See Mlp."""
        return residual + self(x)

    def _route(self, values: Tensor) -> Tensor:
        # -> [rows, num_experts], 0 for those not chosen
        shares = F.linear(values, self._router).softmax(-1, dtype=torch.float32)
        top = shares.topk(self._config.top_k, -1)
        chosen = top.values
        if self._config.normalised:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        weights = torch.zeros_like(shares).scatter_(1, top.indices, chosen)
        return weights.to(values.dtype)


class SharedExpert:
    """Experts beside one that sees every row; a `gate` [1, hidden_size] says how much it counts for a row."""

    def __init__(self, experts: Experts, shared: DenseMlp, gate: Tensor | None, ops: Ops) -> None:
        self._experts = experts
        self._shared = shared
        self._gate = gate
        self._ops = ops

    def __call__(self, x: Rows) -> Tensor:
        """See Mlp."""
        shared = self._shared(x)
        if self._gate is not None:
            shared = shared * F.linear(self._ops.values(x), self._gate).sigmoid()
        return self._experts(x) + shared

    def add_to(self, residual: Tensor, x: Rows) -> Tensor:
        """See Mlp."""
        return residual + self(x)
