"""Activations of MLPs, by their names in config.json.

Kernels compute them, too: engine/kernels/cpu/activations.py.
"""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.cpu.arguments import SWIGLU_ALPHA, SWIGLU_LIMIT

if TYPE_CHECKING:
    from engine.models.model_config import ModelConfig

Activation = Callable[[Tensor], Tensor]


def activation_of(config: "ModelConfig", stored_xielu: Tensor | None) -> Activation:
    """The activation of a layer's MLP, which may have parameters [4]."""
    activation = ACTIVATIONS[config.activation]
    if stored_xielu is not None:
        alpha_p, alpha_n, beta, eps = xielu_parameters(stored_xielu)
        activation = partial(xielu, alpha_p=alpha_p, alpha_n=alpha_n, beta=beta, eps=eps)
    if config.activation_factors != (1.0, 1.0):
        activation = partial(_scaled, activation, *config.activation_factors)
    if config.gate_sparsity:
        activation = partial(_sparse, activation, NormalDist().inv_cdf(config.gate_sparsity))
    return activation


def _scaled(activation: Activation, before: float, after: float, x: Tensor) -> Tensor:
    """An activation between two factors."""
    return activation(x * before) * after


def _sparse(activation: Activation, num_deviations: float, x: Tensor) -> Tensor:
    """The activation of what exceeds the mean of a row by so many standard deviations: 0 for the share of numbers that
    a normal distribution has below (Gaussian top-k, Gemma 3n).
    """
    limit = x.mean(-1, keepdim=True) + x.std(-1, keepdim=True, unbiased=False) * num_deviations
    return activation(F.relu(x - limit))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


CLAMPED_SWIGLU = "clamped_swiglu"


def _clamped_swiglu(gate_up: Tensor) -> Tensor:
    """gpt-oss: [rows, 2 * width] with gates and ups side by side -> [rows, width]."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SWIGLU_ALPHA))


def xielu(
    x: Tensor,
    alpha_p: Tensor | float = 0.8,
    alpha_n: Tensor | float = 0.8,
    beta: Tensor | float = 0.5,
    eps: Tensor | float = -1e-6,
) -> Tensor:
    """x > 0: alpha_p x^2 + beta x; else alpha_n (e^x - 1 - x) + beta x (xIELU, Huang and Schlag 2024). The defaults are
    those before training; each layer of Apertus has its own.
    """
    negative = (torch.expm1(x.clamp(max=eps)) - x) * alpha_n
    return torch.where(x > 0, alpha_p * x * x, negative) + beta * x


def xielu_parameters(stored: Tensor) -> Tensor:
    """The four parameters of `xielu` from those of a checkpoint [4], whose alphas can be any numbers."""
    alpha_p, alpha_n, beta, eps = stored.float()
    return torch.stack((F.softplus(alpha_p), beta + F.softplus(alpha_n), beta, eps))


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu2": _relu_squared,
    "xielu": xielu,
    CLAMPED_SWIGLU: _clamped_swiglu,
}
"""Activations by their names in config.json. CLAMPED_SWIGLU takes gates and ups, the others one of them."""
