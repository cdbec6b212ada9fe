"""The MLP of a layer: gated, plain, or a mixture of experts."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.facts import ExpertsConfig
from engine.models.layers import Activation
from engine.models.ops import LinearLayer, Ops, Rows


class Mlp(Protocol):
    """Plug point of a layer: DenseMlp, Experts, SharedExpert."""

    @property
    def ops(self) -> Ops:
        """Operations that produce this MLP's input rows."""
        ...

    def __call__(self, x: Rows, /) -> Tensor:
        """Compute the MLP: [rows, hidden_size] -> the same shape."""
        ...

    def add_to(self, residual: Tensor, x: Rows, /) -> Tensor:
        """`residual` plus the MLP of x; may write into `residual`."""
        ...


class DenseMlp:
    """down(activation(gate) * up), or down(activation(up)) if not `gated`."""

    def __init__(self, up: LinearLayer, down: LinearLayer, activation: Activation, *, gated: bool) -> None:
        self.ops = up.ops
        self._up = up
        self._down = down
        self._activation = activation
        self._bend = down.ops.gated if gated else down.ops.activated

    def __call__(self, x: Rows) -> Tensor:
        return self._down(self._bend(self._activation, self._up(x)))

    def add_to(self, residual: Tensor, x: Rows) -> Tensor:
        return self._down.add_to(residual, self._bend(self._activation, self._up(x)))


class Experts:
    """A mixture of experts (Shazeer et al. 2017): each row is processed by `top_k` experts. The router is never
    quantised.

    Experts run in order, each with all of its rows, so a row's result does not depend on its batch.
    """

    def __init__(self, config: ExpertsConfig, router: Tensor, experts: list[DenseMlp]) -> None:
        self.ops = experts[0].ops
        self._config = config
        self._router = router  # [num_experts, hidden_size]
        self._experts = experts

    def __call__(self, x: Rows) -> Tensor:
        values = self.ops.values(x)
        weights = self._route(values)  # [rows, num_experts]
        total = torch.zeros_like(values)
        for expert in weights.any(0).nonzero()[:, 0].tolist():
            rows = weights[:, expert].nonzero()[:, 0]
            result = self._experts[expert](self.ops.rows(values[rows]))
            total.index_add_(0, rows, result * weights[rows, expert, None])
        return total

    def add_to(self, residual: Tensor, x: Rows) -> Tensor:
        return residual + self(x)

    def _route(self, values: Tensor) -> Tensor:
        # -> [rows, num_experts], 0 for experts that are not selected
        shares = F.linear(values, self._router).softmax(-1, dtype=torch.float32)
        top = shares.topk(self._config.top_k, -1)
        chosen = top.values
        if self._config.normalised:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        weights = torch.zeros_like(shares).scatter_(1, top.indices, chosen)
        return weights.to(values.dtype)


class SharedExpert:
    """Experts plus a shared expert that processes every row; `gate` [1, hidden_size] weights its output per row."""

    def __init__(self, experts: Experts, shared: DenseMlp, gate: Tensor | None) -> None:
        self.ops = experts.ops
        self._experts = experts
        self._shared = shared
        self._gate = gate

    def __call__(self, x: Rows) -> Tensor:
        shared = self._shared(x)
        if self._gate is not None:
            shared = shared * F.linear(self.ops.values(x), self._gate).sigmoid()
        return self._experts(x) + shared

    def add_to(self, residual: Tensor, x: Rows) -> Tensor:
        return residual + self(x)
