"""Moves factors of input channels from activations to weights, without changing what the layer computes.

A matrix is multiplied by factors along its inputs; the norm before it, or the rows of the matrix before it, are divided
by them. Norms feed qkv and gate_up; the values of qkv feed o, and the second half of gate_up feeds down.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.quantizer.layer import FloatLayer
from engine.quantizer.statistics import InputStatistics

_NORM_BEFORE = {"qkv": "input_norm", "gate_up": "post_norm"}
_MATRIX_BEFORE = {"o": "qkv", "down": "gate_up"}
_TINY = 1e-5


def smoothquant_factors(weight: Tensor, statistics: InputStatistics, alpha: float) -> Tensor:
    """SmoothQuant (Xiao et al. 2023), equation 4: the larger `alpha`, the more is moved to the weights: [inputs]."""
    inputs, weights = statistics.largest.clamp(min=_TINY), weight.abs().amax(0).clamp(min=_TINY)
    return (inputs**alpha / weights ** (1 - alpha)).clamp(min=_TINY)


def tie(layer: FloatLayer, name: str, factors: Tensor) -> Tensor:
    """Factors [inputs] that can be folded: inputs of `o` that are the same value, of one key/value head, get one."""
    if name != "o":
        return factors
    by_value = factors.view(layer.config.num_kv_heads, layer.config.queries_per_kv_head, layer.config.head_dim)
    return by_value.amax(1, keepdim=True).expand_as(by_value).flatten()


def fold(layer: FloatLayer, name: str, factors: Tensor, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    """Multiply matrix `name` by tied factors along its inputs, and divide what is before it.

    A norm is rounded to the type in which it is stored, `dtypes` by its name; the matrix takes what that changes.
    Returns the factors that were folded.
    """
    if name in _NORM_BEFORE:
        norm = layer.vectors[_NORM_BEFORE[name]]
        divided = (norm / factors).to(dtypes[_NORM_BEFORE[name]]).float()
        is_lost = divided == 0
        divided = torch.where(is_lost, norm, divided)
        factors = torch.where(is_lost, 1.0, norm / divided)
        layer.vectors[_NORM_BEFORE[name]] = divided
    else:
        per_row = _by_value(layer, factors) if name == "o" else factors
        before = _MATRIX_BEFORE[name]
        layer.matrices[before][-len(per_row) :].div_(per_row[:, None])
        if before in layer.biases:
            layer.biases[before][-len(per_row) :].div_(per_row)
    layer.matrices[name].mul_(factors)
    return factors


def _by_value(layer: FloatLayer, factors: Tensor) -> Tensor:
    """Tied factors of o's inputs -> one for each row of the values."""
    by_value = factors.view(layer.config.num_kv_heads, layer.config.queries_per_kv_head, layer.config.head_dim)
    return by_value[:, 0].flatten()
