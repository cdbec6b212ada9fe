"""The decoder's small parts in floating point."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# oneDNN lays weights out for so many rows; measured, it then is as fast as any other for 1 to 512.
_PACKED_FOR_ROWS = 64
# Smaller weights stay as they are: calling oneDNN costs 40 microseconds.
_MIN_PACKED_ELEMENTS = 2**19

Activation = Callable[[Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}
"""By the names of config.json."""


class Linear:
    """x [rows, inputs] times weight [outputs, inputs] transposed, plus bias -> [rows, outputs].

    On CPU in fp32 a large weight is kept in oneDNN's blocked layout only, which makes batches of 4 to 64 rows up to 2.5
    times as fast as torch's own product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = weight.numel() >= _MIN_PACKED_ELEMENTS and _is_cpu_fp32(weight) and _can_pack()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to rows."""
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return product
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` plus the result."""
        return residual + self(x)


def _can_pack() -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in fp32."""
    if not _is_cpu_fp32(x):
        return F.rms_norm(x, weight.shape, weight, eps)
    # torch has no fused kernel for CPU; these are half as many steps as its decomposition.
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight)


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm over the last dimension or, if `centred`, layer norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape."""
        if self.centred:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps)


def _is_cpu_fp32(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32


class FloatOps:
    """Ops of a decoder in floating point; see engine.models.ops."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A linear layer."""
        return Linear(weight, bias)

    def rows(self, x: Tensor) -> Tensor:
        """x [rows, width] as linear layers take it."""
        return x

    def values(self, x: Tensor) -> Tensor:
        """The reverse of `rows`."""
        return x

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """The norm of x [rows, width]."""
        return norm(x)

    def activated(self, activation: Activation, x: Tensor) -> Tensor:
        """activation(x)."""
        return activation(x)

    def gated(self, activation: Activation, gate_up: Tensor) -> Tensor:
        """activation(gate) * up of [rows, 2 * width]."""
        gate, up = gate_up.chunk(2, -1)
        return activation(gate) * up
