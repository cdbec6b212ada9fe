"""Packers of matrices in NVFP4 and MXFP4, from the formats' definitions; see quantized.py."""

import torch
from torch import Tensor

from mesh.domain.errors import ConfigurationError

Stored = tuple[dict[str, Tensor], Tensor]
_LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_NVFP4_GROUP, MXFP4_GROUP = 16, 32


def nvfp4(weight: Tensor) -> Stored:
    """As llm-compressor stores it, with a scale of the matrix that divides."""
    scales, shared = _nvfp4_scales(weight)
    divisor = 1 / shared
    packed, values = _rounded(weight, scales.float() / divisor)
    parts = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": divisor}
    return parts | {"input_global_scale": torch.ones(1)}, values


def modelopt_nvfp4(weight: Tensor) -> Stored:
    """With a scale of the matrix that multiplies."""
    scales, shared = _nvfp4_scales(weight)
    packed, values = _rounded(weight, scales.float() * shared)
    parts = {"weight": packed, "weight_scale": scales, "weight_scale_2": shared.view(())}
    return parts | {"input_scale": torch.ones(())}, values


def mxfp4(weight: Tensor) -> Stored:
    if weight.shape[1] % MXFP4_GROUP:
        raise ConfigurationError(f"blocks of {MXFP4_GROUP} do not divide its {weight.shape[1]} inputs")
    largest = weight.unflatten(1, (-1, MXFP4_GROUP)).abs().amax(-1).clamp(min=1e-6)
    exponents = torch.floor(torch.log2(largest)) - 2
    packed, values = _rounded(weight, 2.0**exponents)
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, values


def _nvfp4_scales(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of groups, and that of the matrix [1]."""
    shared = weight.abs().max().float().view(1) / (6 * 448)
    largest = weight.unflatten(1, (-1, _NVFP4_GROUP)).abs().amax(-1)
    return (largest / 6 / shared).clamp(min=2**-9).to(torch.float8_e4m3fn), shared


def _rounded(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers a byte, and what they mean."""
    by_input = scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    codes = ((weight / by_input).abs().unsqueeze(-1) - _LEVELS).abs().argmin(-1)
    values = _LEVELS[codes] * by_input * torch.where(weight < 0, -1.0, 1.0)
    codes = codes + 8 * (weight < 0)
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8), values
