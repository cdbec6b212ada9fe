"""Layers of Gemma 4 and 3n in the eager decoder: norms of queries, keys and values; an MLP beside the experts; what a
layer adds for the token itself; a factor of the residual, or several residuals. `engine.models.per_layer_config` has
the sizes, which differ by layer.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from engine.attention.backend import AttentionShape, attention_shape
from engine.models.activations import ACTIVATIONS, Activation
from engine.models.encodings import Parameters
from engine.models.linear import LinearLayer, make_linear
from engine.models.model_config import ModelConfig
from engine.models.norms import Norm, rms_norm
from engine.models.rope import Rotation, rotate
from engine.models.streams import Streams, take_streams

if TYPE_CHECKING:
    from engine.models.layer import Attend, DenseMlp, Experts, Layer, LinearLayers


@dataclass(frozen=True, slots=True)
class LayerInput:
    """The model's own row for a token in this layer (per-layer embeddings, Gemma 3n), added through a gate that the
    residual opens.
    """

    gate: LinearLayer
    projection: LinearLayer
    out_norm: Norm
    activation: Activation

    def __call__(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """inputs: [num_tokens, input_width] -> what is added to the residual."""
        opened = self.activation(self.gate(self.gate.ops.rows(residual))) * inputs
        return self.out_norm(self.projection(self.projection.ops.rows(opened)))


@dataclass(frozen=True, slots=True)
class Beside:
    """An MLP beside the experts. The router sees the residual through a norm of its own."""

    mlp: "DenseMlp"
    mlp_norm: Norm
    router_norm: Norm
    experts_norm: Norm
    experts_out_norm: Norm

    def __call__(self, residual: Tensor, layer: "Layer") -> Tensor:
        """The sum that both add to the residual, before the last norm."""
        experts = cast("Experts", layer.mlp)
        assert layer.post_norm is not None
        beside = self.mlp_norm(self.mlp(self.mlp.ops.norm(residual, layer.post_norm)))
        routed = experts(experts.ops.norm(residual, self.experts_norm), self.router_norm(residual))
        return beside + self.experts_out_norm(routed)


@dataclass(frozen=True, slots=True)
class SizedLayer:
    """A layer with the parts that only these models have. `k_norm` is None if it reads the KV of an earlier layer. With
    `streams` the residual is that of all streams, and there is no scalar.
    """

    layer: "Layer"
    heads: AttentionShape
    q_norm: Norm
    k_norm: Norm | None
    scalar: Tensor | None
    beside: Beside | None
    layer_input: LayerInput | None
    streams: Streams | None = None

    def __call__(self, residual: Tensor, rotation: Rotation | None, attend: "Attend", inputs: Tensor | None) -> Tensor:
        """The residual after the layer. `attend` gets keys and values of no heads from a layer without KV."""
        if self.streams is not None:
            return self._change_streams(self.streams, residual, rotation, attend, inputs)
        assert self.scalar is not None
        residual = self._add_mlp(residual + self._attended(residual, rotation, attend))
        if self.layer_input is not None and inputs is not None:
            residual = residual + self.layer_input(residual, inputs)
        return residual * self.scalar

    def _change_streams(
        self, streams: Streams, residual: Tensor, rotation: Rotation | None, attend: "Attend", inputs: Tensor | None
    ) -> Tensor:
        assert self.layer.input_norm is not None
        assert self.layer_input is not None
        assert inputs is not None
        predicted = streams.predict(torch.unflatten(residual, 1, (-1, len(streams.scale))))
        first = predicted[:, 0]
        beside = streams.beside_attention(self.layer.input_norm(first))
        first = self._add_mlp((first + self._attended(first, rotation, attend) + beside) * 2**-0.5)
        corrected = streams.correct(predicted, first)
        corrected[:, 1:] += self.layer_input(corrected[:, 0] * streams.scale, inputs)[:, None]
        return corrected.flatten(1)

    def _attended(self, residual: Tensor, rotation: Rotation | None, attend: "Attend") -> Tensor:
        """Return the sum that attention adds to the residual."""
        layer = self.layer
        assert rotation is not None
        assert layer.input_norm is not None
        assert layer.attn_out_norm is not None
        assert layer.qkv is not None
        assert layer.o is not None
        projected = layer.qkv(layer.qkv.ops.norm(residual, layer.input_norm))
        mixed = attend(*self._project(projected, rotation))
        return layer.attn_out_norm(layer.o(layer.o.ops.rows(mixed)))

    def _add_mlp(self, residual: Tensor) -> Tensor:
        """The residual after the MLP, and the experts beside it."""
        layer = self.layer
        assert layer.post_norm is not None
        assert layer.mlp_out_norm is not None
        assert layer.mlp is not None
        if self.beside is not None:
            return residual + layer.mlp_out_norm(self.beside(residual, layer))
        return residual + layer.mlp_out_norm(layer.mlp(layer.mlp.ops.norm(residual, layer.post_norm)))

    def _project(self, projected: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, dim = self.heads.num_heads, self.heads.head_dim
        heads = projected.view(len(projected), -1, dim)
        queries = rotate(self.q_norm(heads[:, :num_heads]), rotation.cos, rotation.sin)
        if self.k_norm is None:
            return queries, queries[:, :0], queries[:, :0]
        keys, values = heads[:, num_heads:].chunk(2, 1)
        ones = torch.ones_like(self.k_norm.weight)
        return queries, rotate(self.k_norm(keys), rotation.cos, rotation.sin), rms_norm(values, ones, self.k_norm.eps)


def take_sized_layer(
    parameters: Parameters,
    index: int,
    config: ModelConfig,
    linears: "LinearLayers",
    layer: "Layer",
) -> SizedLayer:
    """Take the parameters that layer `index` has in these models only, and build it around the plain `layer`."""
    facts, config = config.per_layer, config.of_layer(index)
    assert facts is not None
    prefix = f"layers.{index}."

    def norm(name: str, factor: float = 1.0) -> Norm:
        weight = parameters.take(prefix + name)
        return Norm(weight if factor == 1.0 else weight * factor, None, config.norm_eps)

    layer_input = beside = None
    if facts.input_width:
        names = (f"{prefix}input_gate", f"{prefix}input_projection")
        gate, projection = (linears.make_linear(name, parameters.take_linear(name)) for name in names)
        layer_input = LayerInput(gate, projection, norm("input_out_norm"), ACTIVATIONS[config.activation])
    if layer.mlp_beside is not None:
        beside = Beside(
            mlp=layer.mlp_beside,
            mlp_norm=norm("mlp_only_norm"),
            router_norm=norm("router_norm", config.hidden_size**-0.5),
            experts_norm=norm("experts_norm"),
            experts_out_norm=norm("experts_out_norm"),
        )
    streams = take_streams(parameters, prefix, config, linears) if facts.num_streams > 1 else None
    return SizedLayer(
        layer,
        attention_shape(config),
        norm("q_norm"),
        norm("k_norm") if facts.layers[index].kv_source == index else None,
        parameters.take(prefix + "scalar") if streams is None else None,
        beside,
        layer_input,
        streams,
    )


class LayerInputs:
    """The input of each layer for a token: a row of a table of its own, and a projection of the embedded token."""

    def __init__(self, parameters: Parameters, config: ModelConfig) -> None:
        assert config.per_layer is not None
        self._width, self._num_layers = config.per_layer.input_width, config.num_layers
        self._hidden_size, self._vocab_size = config.hidden_size, config.per_layer.input_vocab
        self._table = parameters.take("layer_inputs")
        self._projection = make_linear(parameters.take_linear("layer_inputs_projection"))
        self._norm = Norm(parameters.take("layer_inputs_norm"), None, config.norm_eps)
        self._scale = self._hidden_size**-0.5

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """`embedded`: the residual before the first layer -> [num_layers, num_tokens, input_width]."""
        embedded = embedded[:, : self._hidden_size]
        token_ids = token_ids.where(token_ids < self._vocab_size, 0)
        shape = (len(token_ids), self._num_layers, self._width)
        projected = (self._projection(self._projection.ops.rows(embedded)) * self._scale).view(shape)
        of_tokens = (self._table[token_ids].to(embedded.dtype) * self._width**0.5).view(shape)
        return ((self._norm(projected) + of_tokens) * 2**-0.5).transpose(0, 1)
