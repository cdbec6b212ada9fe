"""The decoder's small parts, as free functions over tensors."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

# Up to so many rows, MKL multiplies a tall fp32 matrix by a thin one almost twice as fast as the other way round.
_MAX_THIN_ROWS = 64

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, inputs] times weight [outputs, inputs] transposed, plus bias -> [rows, outputs]."""
    if x.is_cpu and x.dtype == torch.float32 and 1 < x.shape[0] <= _MAX_THIN_ROWS:
        product = torch.mm(weight, x.t())  # [outputs, rows]
        return product.t().contiguous() if bias is None else product.t() + bias
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in fp32."""
    return F.rms_norm(x, weight.shape, weight, eps)


def gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    """activation(gate) * up, for [rows, 2 * inner] that holds both side by side."""
    gate, up = gate_up.chunk(2, -1)
    return activation(gate) * up
