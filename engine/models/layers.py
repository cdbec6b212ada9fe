"""Activations, norms, and linear layers in floating point."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.linear_parameters import LinearParameters

# oneDNN's weight layout is optimised for this number of rows; measured, it is as fast as any other for 1 to 512.
_PACKED_FOR_ROWS = 64
# Smaller weights are not packed: a oneDNN call costs 40 microseconds.
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
"""Activations by their names in config.json."""


def _can_pack() -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in fp32."""
    if not _is_cpu_fp32(x):
        return F.rms_norm(x, weight.shape, weight, eps)
    # torch has no fused kernel for CPU; this takes half as many operations as its decomposition.
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
        if self.centred:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps)


def _is_cpu_fp32(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32


@dataclass(frozen=True, slots=True)
class FloatOps:
    """Ops of floating-point linear layers; rows are tensors of the matrix's dtype."""

    dtype: torch.dtype

    def rows(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def values(self, x: Tensor) -> Tensor:
        return x

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return norm(x).to(self.dtype)

    def activated(self, activation: Activation, x: Tensor) -> Tensor:
        return activation(x.to(self.dtype))

    def gated(self, activation: Activation, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.to(self.dtype).chunk(2, -1)
        return activation(gate) * up


@cache
def _ops_of(dtype: torch.dtype) -> FloatOps:
    return FloatOps(dtype)


class Linear:
    """x [rows, inputs] times weight [outputs, inputs] transposed, plus bias -> [rows, outputs].

    On CPU in fp32 a large weight is stored in oneDNN's blocked layout only, which makes products of 4 to 64 rows up to
    2.5 times as fast as torch's.
    """

    def __init__(self, parameters: LinearParameters) -> None:
        weight = parameters.weight
        self.ops = _ops_of(weight.dtype)
        self._bias = parameters.bias
        self._packed = weight.numel() >= _MIN_PACKED_ELEMENTS and _is_cpu_fp32(weight) and _can_pack()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return product
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)
