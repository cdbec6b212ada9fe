"""The parameters that only Gemma 4 has, as the compiled loop reads them."""

import numpy as np
import torch

from engine.kernels.cpu.arguments import Array, Floats
from engine.kernels.cpu.products.packing import MatrixShape, as_array
from engine.models.encodings import Parameters
from engine.models.model_config import ModelConfig

LAYER_INPUT = ("input_gate", "input_projection")
"""Matrices of a layer, which lie before its others. That of the model, PROJECTION, is the last of all."""
PROJECTION = "layer_inputs_projection"


PER_LAYER_NORMS = ("input_out_norm", "mlp_only_norm", "router_norm", "experts_norm", "experts_out_norm")
"""Norms of a layer in addition to those of a sandwich: of its input, and of experts beside the MLP."""


def take_norms(parameters: Parameters, layer: str, config: ModelConfig) -> dict[str, Floats]:
    """The layer's norms of PER_LAYER_NORMS, [1, hidden] each."""
    assert config.per_layer is not None
    names = (
        *PER_LAYER_NORMS[: int(config.per_layer.input_width > 0)],
        *(PER_LAYER_NORMS[1:] if config.experts else ()),
    )
    taken: dict[str, Floats] = {name: parameters.take(f"{layer}.{name}").float()[None].numpy() for name in names}
    if config.experts is not None:
        taken["router_norm"] = taken["router_norm"] * np.float32(config.hidden_size**-0.5)
    return taken


def input_shapes(config: ModelConfig, group: int) -> tuple[list[MatrixShape], list[MatrixShape]]:
    """Of LAYER_INPUT, and of PROJECTION: nothing, if layers add nothing for the token itself."""
    if config.per_layer is None or not config.per_layer.input_width:
        return [], []
    width, hidden = config.per_layer.input_width, config.hidden_size
    of_layer = [MatrixShape(width, hidden, group=group), MatrixShape(hidden, width, group=group)]
    return of_layer, [MatrixShape(config.num_layers * width, hidden, group=group)]


def take_layer_inputs(parameters: Parameters, config: ModelConfig) -> tuple[Array, Floats]:
    """The table, and the norm of projections: see PackedDecoder."""
    if config.per_layer is None or not config.per_layer.input_width:
        return np.empty((0, 0), np.float32), np.empty((1, 0), np.float32)
    norm: Floats = parameters.take("layer_inputs_norm").float()[None].numpy()
    return as_array(parameters.take("layer_inputs")), norm


def take_scalars(parameters: Parameters, config: ModelConfig, layers: range) -> Floats:
    """The factors of the residual after each of these layers."""
    if config.per_layer is None:
        return np.ones(len(layers), np.float32)
    scalars: Floats = torch.cat([parameters.take(f"layers.{layer}.scalar").float() for layer in layers]).numpy()
    return scalars


def take_sized_head_norms(parameters: Parameters, layer: int, config: ModelConfig) -> Floats:
    """Weights of norms of queries, keys and values, [3, largest head_dim]; ones if there are none."""
    assert config.per_layer is not None
    weights: Floats = np.ones((3, max(sizes.head_dim for sizes in config.per_layer.layers)), np.float32)
    for kind, name in enumerate(("q_norm", "k_norm") if config.stores_kv(layer) else ("q_norm",)):
        taken = parameters.take(f"layers.{layer}.{name}").float().numpy()
        weights[kind, : len(taken)] = taken
    return weights
