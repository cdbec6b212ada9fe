"""The one decoder: embed, layers, norm, output matrix. Pre-norm residual blocks with rotary attention and a gated MLP.

It does not know sequences, blocks or sampling: tokens and metadata come in, hidden states and logits go out.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import ForwardMetadata
from engine.kv_cache import KVCache
from engine.layer_groups import LayerGroups
from engine.models.config import ModelConfig
from engine.models.layers import ACTIVATIONS, rms_norm
from engine.models.ops import LinearLayer, Ops, Rows
from engine.models.rope import RotaryEmbedding, rotate
from mesh.cores import Cores


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    input_norm: Tensor
    qkv: LinearLayer
    o: LinearLayer
    post_norm: Tensor
    gate_up: LinearLayer
    down: LinearLayer
    q_norm: Tensor | None
    k_norm: Tensor | None


class DecoderMemory(NamedTuple):
    """Where KV is, and what attends to it."""

    cache: KVCache
    attention: AttentionBackend


class Decoder:
    """A decoder-only transformer, ready to run.

    It takes the parameters over, emptying the dictionary, so that each can be freed once it is in its final layout.
    """

    def __init__(self, config: ModelConfig, parameters: dict[str, Tensor], ops: Ops, memory: DecoderMemory) -> None:
        self.config = config
        self.num_torch_threads = torch.get_num_threads()
        self._cache, self._attention = memory
        self._ops = ops
        self._embed = parameters.pop("embed")
        self._final_norm = parameters.pop("final_norm")
        self._lm_head = ops.linear(self._embed if config.tied else parameters.pop("lm_head"), None)
        self._layers = [_take_layer(parameters, f"layers.{layer}", ops) for layer in range(config.num_layers)]
        self._activation = ACTIVATIONS[config.activation]
        self._rope = RotaryEmbedding(config.rope, config.head_dim, self._embed.device, self._embed.dtype)

    @property
    def attention_backend(self) -> str:
        """Name of the attention backend in use."""
        return self._attention.name

    def use_cores(self, lent: Cores) -> None:
        """None are used: OpenMP gives every thread the same share and waits for the slowest."""

    def forward(self, token_ids: Tensor, metadata: ForwardMetadata, groups: LayerGroups) -> Tensor:
        """Hidden states [num_tokens, hidden_size] before the final norm; the tokens' KV is in the cache afterwards."""
        cos, sin = self._rope.cos_sin(metadata.positions, metadata.rope_lengths)
        residual = self._embed[token_ids]  # [num_tokens, hidden_size]
        for first, end in groups:
            for index in range(first, end):
                residual = self._run_layer(index, residual, (cos, sin), metadata)
        return residual

    def _run_layer(
        self, index: int, residual: Tensor, rotation: tuple[Tensor, Tensor], metadata: ForwardMetadata
    ) -> Tensor:
        config, ops, layer = self.config, self._ops, self._layers[index]
        x = ops.norm(residual, layer.input_norm, config.norm_eps)
        queries, keys, values = self._project(x, layer, *rotation)
        layer_cache, window = self._cache.layer(index), config.windows[index]
        mixed = self._attention.attend(queries, keys, values, layer_cache, window, metadata)
        residual = layer.o.add_to(residual, ops.rows(mixed.flatten(1)))
        x = ops.norm(residual, layer.post_norm, config.norm_eps)
        return layer.down.add_to(residual, ops.gated(self._activation, layer.gate_up(x)))

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, vocab_size] for rows of `forward`'s result."""
        x = self._ops.norm(hidden, self._final_norm, self.config.norm_eps)
        return self._lm_head(x).to(torch.float32)

    def _project(self, x: Rows, layer: Layer, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [num_tokens, num_heads, head_dim], rotated keys and values [.., num_kv_heads, ..]."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = layer.qkv(x)
        heads = qkv.view(qkv.shape[0], num_rotated + config.num_kv_heads, config.head_dim)
        rotated, values = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
            q, k = rms_norm(q, layer.q_norm, config.norm_eps), rms_norm(k, layer.k_norm, config.norm_eps)
            rotated = torch.cat((q, k), 1)
        rotated = rotate(rotated, cos, sin)
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], values


def _take_layer(parameters: dict[str, Tensor], prefix: str, ops: Ops) -> Layer:
    def linear(name: str) -> LinearLayer:
        return ops.linear(parameters.pop(f"{prefix}.{name}"), parameters.pop(f"{prefix}.{name}_bias", None))

    return Layer(
        input_norm=parameters.pop(f"{prefix}.input_norm"),
        qkv=linear("qkv"),
        o=linear("o"),
        post_norm=parameters.pop(f"{prefix}.post_norm"),
        gate_up=linear("gate_up"),
        down=linear("down"),
        q_norm=parameters.pop(f"{prefix}.q_norm", None),
        k_norm=parameters.pop(f"{prefix}.k_norm", None),
    )
