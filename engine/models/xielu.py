"""xIELU (Huang and Schlag 2024), the activation of Apertus: each layer has trained parameters."""

import torch
from torch import Tensor
from torch.nn import functional as F


def xielu(
    x: Tensor,
    alpha_p: Tensor | float = 0.8,
    alpha_n: Tensor | float = 0.8,
    beta: Tensor | float = 0.5,
    eps: Tensor | float = -1e-6,
) -> Tensor:
    """x > 0: alpha_p x^2 + beta x; else alpha_n (e^x - 1 - x) + beta x. The defaults are those before training."""
    negative = (torch.expm1(x.clamp(max=eps)) - x) * alpha_n
    return torch.where(x > 0, alpha_p * x * x, negative) + beta * x


def xielu_parameters(stored: Tensor) -> Tensor:
    """The four parameters of `xielu` from those of a checkpoint [4], whose alphas can be any numbers."""
    alpha_p, alpha_n, beta, eps = stored.float()
    return torch.stack((F.softplus(alpha_p), beta + F.softplus(alpha_n), beta, eps))
