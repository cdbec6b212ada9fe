"""The one decoder, for all families: embed, layers of attention and MLP, norm, output matrix; see ModelConfig.

It does not know sequences, blocks or sampling: tokens and metadata come in, hidden states and logits go out.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import ForwardMetadata
from engine.kv_cache import KVCache
from engine.layer_groups import LayerGroups
from engine.models.config import ModelConfig
from engine.models.layer import Layer, take_layer, take_norm
from engine.models.layers import Norm
from engine.models.ops import LinearLayer, Ops, Rows
from engine.models.rope import RotaryEmbedding, rotate
from mesh.cores import Cores

Rotation = tuple[Tensor, Tensor]


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
        self._positions = parameters.pop("positions", None)
        self._embed_norm = take_norm(parameters, "embed_norm", config) if config.embed_norm else None
        self._final_norm = take_norm(parameters, "final_norm", config)
        lm_head = self._embed if config.tied else parameters.pop("lm_head")
        self._lm_head = ops.linear(lm_head, parameters.pop("lm_head_bias", None))
        self._layers = [take_layer(parameters, layer, config, ops) for layer in range(config.num_layers)]
        self._ropes = _ropes(config, self._embed)

    @property
    def attention_backend(self) -> str:
        """Name of the attention backend in use."""
        return self._attention.name

    def use_cores(self, lent: Cores) -> None:
        """None are used: OpenMP gives every thread the same share and waits for the slowest."""

    def forward(self, token_ids: Tensor, metadata: ForwardMetadata, groups: LayerGroups) -> Tensor:
        """Hidden states [num_tokens, hidden_size] before the final norm; the tokens' KV is in the cache afterwards."""
        residual = self._embedded(token_ids, metadata.positions)
        rotations = [rope.cos_sin(metadata.positions, metadata.rope_lengths) for rope in self._ropes]
        for first, end in groups:
            for index in range(first, end):
                # Layers with a window come last in `_ropes` where they have a rope of their own.
                rotation = rotations[0 if self.config.windows[index] is None else -1] if rotations else None
                residual = self._run_layer(index, residual, rotation, metadata)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, vocab_size] for rows of `forward`'s result."""
        config = self.config
        logits = self._lm_head(self._ops.norm(hidden, self._final_norm)).to(torch.float32)
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.logit_softcap is not None:
            logits = torch.tanh(logits / config.logit_softcap) * config.logit_softcap
        return logits

    def _embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        # -> [num_tokens, hidden_size]
        x = self._embed[token_ids]
        if self.config.embed_scale != 1.0:
            x = x * torch.tensor(self.config.embed_scale, dtype=x.dtype, device=x.device)
        if self._positions is not None:
            x = x + self._positions[positions]
        return x if self._embed_norm is None else self._embed_norm(x)

    def _run_layer(self, index: int, residual: Tensor, rotation: Rotation | None, metadata: ForwardMetadata) -> Tensor:
        ops, layer = self._ops, self._layers[index]
        x = ops.norm(residual, layer.input_norm)
        queries, keys, values = self._project(layer.qkv(x), layer, rotation)
        layer_cache, window = self._cache.layer(index), self.config.windows[index]
        mixed = ops.rows(self._attention.attend(queries, keys, values, layer_cache, window, metadata).flatten(1))
        if layer.parallel:
            beside = x if layer.post_norm is layer.input_norm else ops.norm(residual, layer.post_norm)
            return layer.mlp.add_to(layer.o.add_to(residual, mixed), beside)
        residual = _add(residual, layer.o, mixed, layer.attn_out_norm)
        return _add(residual, layer.mlp, ops.norm(residual, layer.post_norm), layer.mlp_out_norm)

    def _project(self, qkv: Tensor, layer: Layer, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [num_tokens, num_heads, head_dim], rotated keys and values [.., num_kv_heads, ..]."""
        config = self.config
        num_scored = config.num_heads + config.num_kv_heads
        heads = qkv.view(qkv.shape[0], num_scored + config.num_kv_heads, config.head_dim)
        scored, values = heads[:, :num_scored], heads[:, num_scored:]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = scored[:, : config.num_heads], scored[:, config.num_heads :]
            scored = torch.cat((layer.q_norm(queries), layer.k_norm(keys)), 1)
        if rotation is not None:
            scored = rotate(scored, *rotation)
        return scored[:, : config.num_heads], scored[:, config.num_heads :], values


def _add(residual: Tensor, part: LinearLayer, rows: Rows, out_norm: Norm | None) -> Tensor:
    if out_norm is None:
        return part.add_to(residual, rows)
    return residual + out_norm(part(rows))


def _ropes(config: ModelConfig, like: Tensor) -> list[RotaryEmbedding]:
    """None, one for all layers, or one for those without and one for those with a window."""
    if config.positions != "rotary":
        return []
    facts = [config.rope] if config.window_rope is None else [config.rope, config.window_rope]
    return [RotaryEmbedding(rope, config.head_dim, like.device, like.dtype) for rope in facts]
