"""The contract between linear layers and the operations before them.

Each scheme has its own type of input rows: a tensor, or QuantisedRows. A linear layer's `ops` produce such rows. They
fuse quantisation with the preceding norm or activation, so it needs no separate pass over memory.
"""

from typing import Any, Protocol

from torch import Tensor

from engine.models.layers import Activation, Norm

Rows = Any


class LinearLayer(Protocol):
    """Plug point of a scheme: layers.Linear, int8.Int8Linear; see linear.py."""

    @property
    def ops(self) -> "Ops":
        """Operations that produce this layer's input rows."""
        ...

    def __call__(self, rows: Rows, /) -> Tensor:
        """Multiply, and add the bias: [rows, inputs] -> [rows, outputs]."""
        ...

    def add_to(self, residual: Tensor, rows: Rows, /) -> Tensor:
        """`residual` [rows, outputs] plus the product; may write into `residual`."""
        ...


class Ops(Protocol):
    """Plug point of a scheme: layers.FloatOps, int8.Int8Ops."""

    def rows(self, x: Tensor) -> Rows:
        """Convert x [rows, width] to input rows."""
        ...

    def values(self, rows: Rows) -> Tensor:
        """Convert input rows back to a tensor [rows, width]: the reverse of `rows`."""
        ...

    def norm(self, x: Tensor, norm: Norm) -> Rows:
        """Input rows of the norm of x [rows, width]."""
        ...

    def activated(self, activation: Activation, x: Tensor) -> Rows:
        """Input rows of activation(x)."""
        ...

    def gated(self, activation: Activation, gate_up: Tensor) -> Rows:
        """Input rows of activation(gate) * up; `gate_up` [rows, 2 * width] holds gate and up side by side."""
        ...
