"""What a decoder computes with: the same steps in floating point or in int8.

Rows are what linear layers of one kind take: a tensor, or QuantisedRows. What makes rows (a norm, a gate) hands them
over in that form, so that quantising costs no pass of its own.
"""

from typing import Any, Protocol

from torch import Tensor

from engine.models.layers import Activation, Norm

Rows = Any


class LinearLayer(Protocol):
    """Plug point: layers.Linear, int8.Int8Linear."""

    def __call__(self, rows: Rows, /) -> Tensor:
        """[rows, inputs] -> [rows, outputs]."""
        ...

    def add_to(self, residual: Tensor, rows: Rows, /) -> Tensor:
        """`residual` [rows, outputs] plus the result; may reuse its memory."""
        ...


class Ops(Protocol):
    """Plug point: layers.FloatOps, int8.Int8Ops."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> LinearLayer:
        """A linear layer of weight [outputs, inputs]."""
        ...

    def rows(self, x: Tensor) -> Rows:
        """x [rows, width] as linear layers take it."""
        ...

    def values(self, rows: Rows) -> Tensor:
        """The tensor that rows stand for: the reverse of `rows`."""
        ...

    def norm(self, x: Tensor, norm: Norm) -> Rows:
        """The norm of x [rows, width]."""
        ...

    def activated(self, activation: Activation, x: Tensor) -> Rows:
        """activation(x)."""
        ...

    def gated(self, activation: Activation, gate_up: Tensor) -> Rows:
        """activation(gate) * up, for [rows, 2 * width] that holds both side by side."""
        ...
