"""Moves factors of input channels from activations to weights, without changing what the layer computes.

A matrix is multiplied by factors along its inputs; the norm before it, or the rows of the matrix before it, are divided
by them. Norms feed qkv and gate_up, in some models one norm both; the values of qkv feed o, and the second half of
gate_up feeds down, unless norms are between them (ModelConfig.sub_norms). A plain MLP's up feeds down through its
activation, which factors pass only if it is ReLU; gates that clamp ups let none pass. A norm feeds a recurrent layer's
first matrix, nothing that factors pass its second one.

A norm before a mixture feeds gate_up of all experts, of the shared expert, and the routers, which get the factors too;
each expert's gate_up feeds its own down.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.models.activations import CLAMPED_SWIGLU
from engine.models.blocks import BLOCKS
from engine.models.model_config import ModelConfig
from engine.models.norms import Norm
from engine.quantizer.layer import FloatLayer, FloatLinear
from mesh.domain.errors import ConfigurationError

_NORM_BEFORE = {"qkv": "input_norm", "recurrent_in": "input_norm", "gate_up": "post_norm", "up": "post_norm"}


def require_norms(config: ModelConfig) -> None:
    """Raise ConfigurationError if no norm is before the matrices, or if the checkpoint has no weights of norms."""
    if config.block == "post" or "input_norm" not in BLOCKS[config.block]:
        reason = "no norm is before the matrices"
    elif not config.norm_weight:
        reason = "the checkpoint has no weights of norms"
    elif config.per_layer is not None:
        reason = "its values have a norm, and its experts one of their own"
    else:
        return
    raise ConfigurationError(
        f"smoothquant and awq fold factors into norms, which {config.architecture} does not allow: {reason}. Take "
        "another scheme"
    )


def folding_order(layer: FloatLayer) -> tuple[tuple[str, ...], ...]:
    """The matrices of a layer whose inputs can have factors; those with the same inputs together. Rows of qkv and
    gate_up are divided before factors for their inputs are sought.
    """
    config, names, up = layer.config, layer.linears, "gate_up" if layer.config.gated else "up"
    first = tuple(name for name in ("qkv", "recurrent_in") if name in names)
    ups = tuple(name for name in names if name.rpartition(".")[2] == up)
    downs = tuple((name,) for name in names if name.rpartition(".")[2] == "down")
    from_norms = ((*first, *ups),) if config.block == "parallel-shared" else (first, ups)
    # Results of latent heads follow from the latent, which norms feed.
    values = (("o",),) if "o" in names and config.latent is None and not config.sub_norms else ()
    passes = config.activation == "relu" or (config.gated and config.activation != CLAMPED_SWIGLU)
    passes = passes and not config.sub_norms
    return tuple(matrices for matrices in (*values, *(downs if passes else ()), *from_norms) if matrices)


def tie(layer: FloatLayer, name: str, factors: Tensor) -> Tensor:
    """Factors [inputs] that can be folded: inputs of `o` that are the same value, of one key/value head, get one."""
    if name != "o":
        return factors
    by_value = factors.view(layer.config.num_kv_heads, layer.config.queries_per_kv_head, layer.config.head_dim)
    return by_value.amax(1, keepdim=True).expand_as(by_value).flatten()


def fold(layer: FloatLayer, names: tuple[str, ...], factors: Tensor, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    """Multiply matrices that have the same inputs by tied factors along these, and divide what is before them.

    `dtypes`: in which norms, biases and routers are stored, by the last parts of their names. A norm is rounded to its
    own, and the matrix takes what that changes; so are routers. Channels whose norm or bias would be infinite in it get
    the factor 1. Returns the factors that were folded.
    """
    kind = names[0].rpartition(".")[2]
    if kind in _NORM_BEFORE:
        is_only_norm = layer.layer.post_norm is layer.layer.input_norm
        name = "input_norm" if is_only_norm else _NORM_BEFORE[kind]
        factors = _divide_norm(layer, name, factors, dtypes)
        if is_only_norm or name == "post_norm":
            _multiply_routers(layer, factors, dtypes)
    else:
        up = names[0].removesuffix(kind) + ("gate_up" if layer.config.gated else "up")
        before = layer.linears["qkv" if kind == "o" else up]
        factors = _divide_rows(layer, before, factors, dtypes, are_values=kind == "o")
    for name in names:
        layer.linears[name].weight.mul_(factors)
    return factors


def _divide_rows(
    layer: FloatLayer, before: FloatLinear, factors: Tensor, dtypes: Mapping[str, torch.dtype], *, are_values: bool
) -> Tensor:
    """Divide the last rows of the matrix before by factors, its values by one for each of their heads; returns those
    by which they were divided.
    """
    per_row = _by_value(layer, factors) if are_values else factors
    rows = slice(-len(per_row), None)
    if before.bias is not None:
        name = f"{before.name}_bias"
        divided = (before.bias[rows] / per_row).to(dtypes[name.rpartition(".")[2]])
        per_row = torch.where(divided.isfinite(), per_row, 1.0)
        before.bias[rows].div_(per_row)
        layer.changed[name] = before.bias
    before.weight[rows].div_(per_row[:, None])
    return _by_input(layer, per_row) if are_values else per_row


def _divide_norm(layer: FloatLayer, name: str, factors: Tensor, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    """Divide a norm by factors; returns those by which its rounded weight was divided."""
    norm: Norm = getattr(layer.layer, name)
    offset = layer.config.tensors.norm_offset
    divided = (norm.weight / factors - offset).to(dtypes[name]).float() + offset
    is_lost = (divided == 0) | ~divided.isfinite()
    if norm.bias is not None:
        bias_dtype = dtypes[f"{name}_bias"]
        is_lost |= ~(norm.bias / factors).to(bias_dtype).isfinite()
    divided = torch.where(is_lost, norm.weight, divided)
    factors = torch.where(is_lost, 1.0, norm.weight / divided)
    norm.weight.copy_(divided)
    layer.changed[name] = divided - offset
    if norm.bias is not None:
        norm.bias.copy_((norm.bias / factors).to(bias_dtype))
        layer.changed[f"{name}_bias"] = norm.bias
    return factors


def _multiply_routers(layer: FloatLayer, factors: Tensor, dtypes: Mapping[str, torch.dtype]) -> None:
    for name, router in layer.routers.items():
        router.copy_((router * factors).to(dtypes[name]))
        layer.changed[name] = router


def _by_value(layer: FloatLayer, factors: Tensor) -> Tensor:
    """Tied factors of o's inputs -> one for each row of the values."""
    by_value = factors.view(layer.config.num_kv_heads, layer.config.queries_per_kv_head, layer.config.head_dim)
    return by_value[:, 0].flatten()


def _by_input(layer: FloatLayer, per_row: Tensor) -> Tensor:
    """The reverse of _by_value."""
    by_value = per_row.view(layer.config.num_kv_heads, 1, layer.config.head_dim)
    return by_value.expand(-1, layer.config.queries_per_kv_head, -1).flatten()
