"""The one decoder: embed, layers, norm, output matrix. Pre-norm residual blocks with rotary attention and a gated MLP.

It does not know sequences, blocks or sampling: tokens and metadata come in, hidden states and logits go out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import ForwardMetadata
from engine.kv_cache import KVCache
from engine.models.config import ModelConfig
from engine.models.layers import ACTIVATIONS, gated, linear, rms_norm
from engine.models.rope import RotaryEmbedding, rotate


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Parameters of one layer; the names are those of `parameters.py`."""

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Decoder:
    """A decoder-only transformer, ready to run."""

    def __init__(self, config: ModelConfig, parameters: Mapping[str, Tensor]) -> None:
        self.config = config
        self._embed = parameters["embed"]
        self._final_norm = parameters["final_norm"]
        self._lm_head = parameters["embed" if config.tied else "lm_head"]
        self._layers = [_layer_weights(parameters, layer) for layer in range(config.num_layers)]
        self._activation = ACTIVATIONS[config.activation]
        self._rope = RotaryEmbedding(config.rope, config.head_dim, self._embed.device, self._embed.dtype)

    def forward(
        self,
        token_ids: Tensor,
        metadata: ForwardMetadata,
        cache: KVCache,
        attention: AttentionBackend,
        on_layer: Callable[[int], None],
    ) -> Tensor:
        """Hidden states [num_tokens, hidden_size] before the final norm; the tokens' KV is in the cache afterwards.

        `on_layer(layer)` is called once the KV of that layer is written.
        """
        config = self.config
        cos, sin = self._rope.cos_sin(metadata.positions, metadata.rope_lengths)
        residual = self._embed[token_ids]  # [num_tokens, hidden_size]
        for layer, weights in enumerate(self._layers):
            x = rms_norm(residual, weights.input_norm, config.norm_eps)
            queries, keys, values = self._project(x, weights, cos, sin)
            mixed = attention.attend(queries, keys, values, cache.layer(layer), config.windows[layer], metadata)
            on_layer(layer)
            residual = residual + linear(mixed.flatten(1), weights.o, weights.o_bias)
            x = rms_norm(residual, weights.post_norm, config.norm_eps)
            inner = gated(self._activation, linear(x, weights.gate_up, weights.gate_up_bias))
            residual = residual + linear(inner, weights.down, weights.down_bias)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, vocab_size] for rows of `forward`'s result."""
        x = rms_norm(hidden, self._final_norm, self.config.norm_eps)
        return linear(x, self._lm_head).to(torch.float32)

    def _project(self, x: Tensor, weights: LayerWeights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [num_tokens, num_heads, head_dim], rotated keys and values [.., num_kv_heads, ..]."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = linear(x, weights.qkv, weights.qkv_bias)
        heads = qkv.view(x.shape[0], num_rotated + config.num_kv_heads, config.head_dim)
        rotated, values = heads[:, :num_rotated], heads[:, num_rotated:]
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
            q, k = rms_norm(q, weights.q_norm, config.norm_eps), rms_norm(k, weights.k_norm, config.norm_eps)
            rotated = torch.cat((q, k), 1)
        rotated = rotate(rotated, cos, sin)
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], values


def _layer_weights(parameters: Mapping[str, Tensor], layer: int) -> LayerWeights:
    prefix = f"layers.{layer}."
    return LayerWeights(**{name[len(prefix) :]: p for name, p in parameters.items() if name.startswith(prefix)})
