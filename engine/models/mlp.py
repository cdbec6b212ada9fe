"""The MLP of an eager decoder's layer: gated, plain, or a mixture of experts."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.expert_products import ChosenExperts
from engine.models.linear import Activation, Adapters, LinearLayer, Ops, Rows
from engine.models.model_config import ExpertsConfig


class Mlp(Protocol):
    """Plug point of a layer: DenseMlp, Experts, SharedExpert, Summed."""

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
        return self._down(self.inner(self._up(x)))

    def add_to(self, residual: Tensor, x: Rows) -> Tensor:
        return self._down.add_to(residual, self.inner(self._up(x)))

    def inner(self, up: Tensor) -> Rows:
        """The input rows of `down` from the results of `up`."""
        return self._bend(self._activation, up)


class Experts:
    """A mixture of experts (Shazeer et al. 2017): each row is processed by `top_k` experts. The router is never
    quantised. `experts`: by number, all of them or those of this rank.

    On a GPU, `on_device` computes steps of few rows, and those that are captured. Otherwise the host reads once how
    many rows each expert has, and the experts run in order, each with all of its rows, so a row's result does not
    depend on its batch.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        router: Tensor,
        experts: Mapping[int, DenseMlp],
        adapters: Adapters,
        on_device: ChosenExperts | None = None,
    ) -> None:
        self.ops = next(iter(experts.values())).ops
        self._config = config
        self._router = router  # [num_experts, hidden_size]
        self._experts = experts
        self._adapters = adapters
        self._on_device = on_device

    def __call__(self, x: Rows) -> Tensor:
        values = self.ops.values(x)
        chosen, shares = self._choose(values)
        if self._on_device is not None and self._on_device.products.fit_step:
            return self._on_device(values, chosen, shares)
        return self._one_by_one(values, chosen.flatten(), shares.flatten())

    def add_to(self, residual: Tensor, x: Rows) -> Tensor:
        return residual + self(x)

    def _choose(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each row, and the weights of their results: both [rows, top_k]."""
        scores = F.linear(values, self._router).softmax(-1, dtype=torch.float32)
        shares, chosen = scores.topk(self._config.top_k, -1)
        if self._config.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        return chosen, shares.to(values.dtype)

    def _one_by_one(self, values: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """chosen, shares: [choices], `top_k` of each row."""
        total = torch.zeros_like(values)
        order = chosen.argsort(stable=True)  # by expert; rows of an expert ascend, as adapters need them
        rows, shares = order // self._config.top_k, shares[order, None]
        counts = torch.zeros(self._config.num_experts, dtype=torch.int64, device=chosen.device)
        end = 0
        for expert, count in enumerate(counts.index_add_(0, chosen, torch.ones_like(chosen)).tolist()):
            first, end = end, end + count
            if not count or expert not in self._experts:
                continue
            of_expert = rows[first:end]
            with self._adapters.among(of_expert):
                result = self._experts[expert](self.ops.rows(values[of_expert]))
            total.index_add_(0, of_expert, result * shares[first:end])
        return total


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
