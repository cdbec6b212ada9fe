"""Moves factors of input channels from activations to weights, without changing what the layer computes.

A matrix is multiplied by factors along its inputs; the norm before it, or the rows of the matrix before it, are divided
by them. Norms feed qkv and gate_up; the values of qkv feed o, and the second half of gate_up feeds down. A plain MLP's
up feeds down through its activation, which factors pass only if it is ReLU.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.models.linear import Norm
from engine.models.model_config import ModelConfig
from engine.quantizer.layer import FloatLayer
from mesh.domain.errors import ConfigurationError

_NORM_BEFORE = {"qkv": "input_norm", "gate_up": "post_norm", "up": "post_norm"}
_WHY_NOT = {
    "parallel-shared": "one norm feeds attention and MLP",
    "post": "no norm is before the matrices",
}
"""Kinds of layers (engine.models.model_config.BLOCKS) whose norms cannot take factors."""


def folding_order(config: ModelConfig) -> tuple[str, ...]:
    """The matrices whose inputs can have factors: rows of qkv and gate_up are divided before factors for their inputs
    are sought. Raises ConfigurationError if a norm of the model cannot take factors.
    """
    reason = _WHY_NOT.get(config.block) if config.experts is None else "a norm feeds all experts and their router"
    if reason is not None:
        raise ConfigurationError(
            f"smoothquant and awq fold factors into norms, which {config.architecture} does not allow: {reason}. Take "
            "another scheme"
        )
    if config.gated:
        return ("o", "down", "qkv", "gate_up")
    return ("o", "down", "qkv", "up") if config.activation == "relu" else ("o", "qkv", "up")


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
        factors = _divide_norm(layer, _NORM_BEFORE[name], factors, dtypes)
    else:
        before = layer.linears["qkv" if name == "o" else "gate_up" if layer.config.gated else "up"]
        per_row = _by_value(layer, factors) if name == "o" else factors
        before.weight[-len(per_row) :].div_(per_row[:, None])
        if before.bias is not None:
            before.bias[-len(per_row) :].div_(per_row)
            layer.changed[f"{before.name}_bias"] = before.bias
    layer.linears[name].weight.mul_(factors)
    return factors


def _divide_norm(layer: FloatLayer, name: str, factors: Tensor, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    """Divide a norm by factors; returns those by which its rounded weight was divided."""
    norm: Norm = getattr(layer.layer, name)
    offset = layer.config.tensors.norm_offset
    divided = (norm.weight / factors - offset).to(dtypes[name]).float() + offset
    is_lost = divided == 0
    divided = torch.where(is_lost, norm.weight, divided)
    factors = torch.where(is_lost, 1.0, norm.weight / divided)
    norm.weight.copy_(divided)
    layer.changed[name] = divided - offset
    if norm.bias is not None:
        norm.bias.copy_((norm.bias / factors).to(dtypes[f"{name}_bias"]))
        layer.changed[f"{name}_bias"] = norm.bias
    return factors


def _by_value(layer: FloatLayer, factors: Tensor) -> Tensor:
    """Tied factors of o's inputs -> one for each row of the values."""
    by_value = factors.view(layer.config.num_kv_heads, layer.config.queries_per_kv_head, layer.config.head_dim)
    return by_value[:, 0].flatten()
