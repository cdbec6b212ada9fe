"""The encoder-decoder: it reads a prompt's tokens and its decoder's in one step, and writes the KV of both.

It stands where a decoder stands in a ModelRunner and, as that, knows no sequences, blocks or sampling. The encoder's
layers run first; then the decoder's, each of which first projects what the encoder made of the prompts to this layer's
keys and values. So KV is complete layer by layer, and leaves a prefill worker while later layers are computed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.metadata import ForwardMetadata
from engine.layer_groups import LayerGroups
from engine.models.decoder import DecoderMemory
from engine.models.encoder_decoder.attention import attend_own, attend_prompts, causal_bias
from engine.models.encoder_decoder.config import EncoderDecoderConfig
from engine.models.encoder_decoder.position_bias import PositionBias
from engine.models.encoder_decoder.step import Step, plan_step
from engine.models.layers import ACTIVATIONS, Norm
from engine.models.mlp import DenseMlp
from engine.models.ops import LinearLayer, Ops, Rows
from mesh.cores import Cores


@dataclass(frozen=True, slots=True)
class SelfLayer:
    """Self-attention of a layer."""

    norm: Norm
    qkv: LinearLayer
    o: LinearLayer


@dataclass(frozen=True, slots=True)
class CrossLayer:
    """Attention of a decoder's layer to the prompt."""

    norm: Norm
    q: LinearLayer
    kv: LinearLayer
    o: LinearLayer


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; `cross` in the decoder only."""

    own: SelfLayer
    cross: CrossLayer | None
    mlp_norm: Norm
    mlp: DenseMlp


@dataclass(frozen=True, slots=True)
class Stack:
    """The encoder, or the decoder."""

    layers: list[Layer]
    bias: PositionBias
    final_norm: Norm


class EncoderDecoder:
    """Ready to run. It takes the parameters over, emptying the dictionary, as Decoder does."""

    def __init__(
        self, config: EncoderDecoderConfig, parameters: dict[str, Tensor], ops: Ops, memory: DecoderMemory
    ) -> None:
        self.config = config
        self.num_torch_threads = torch.get_num_threads()
        self._cache, self._attention = memory
        self._ops = ops
        self._embed = parameters.pop("embed")
        self._lm_head = ops.linear(parameters.pop("lm_head", self._embed), None)
        parts = _Parts(config, parameters, ops)
        self._encoder = parts.stack("encoder", config.num_encoder_layers)
        self._decoder = parts.stack("decoder", config.num_layers)

    @property
    def attention_backend(self) -> str:
        """Name of the backend that does cross-attention."""
        return self._attention.name

    def use_cores(self, lent: Cores) -> None:
        """None are used, as by Decoder."""

    def forward(self, token_ids: Tensor, metadata: ForwardMetadata, groups: LayerGroups) -> Tensor:
        """Hidden states [num_tokens, hidden_size] before the final norm, of the decoder's tokens only: rows of the
        encoder's are zero. All tokens' KV is in the cache afterwards.
        """
        step = plan_step(metadata, self._cache.layout.block_size)
        prompts = self._encode(token_ids[step.encoder_rows], step.lengths) if step.lengths else None
        masks = [causal_bias(group, self._decoder.bias) for group in step.groups]
        residual = self._embed[token_ids[step.decoder_rows]]  # [num decoder tokens, hidden_size]
        for first, end in groups:
            for index in range(first, end):
                residual = self._decode(index, residual, prompts, step, masks)
        if prompts is None:
            return residual
        hidden = residual.new_zeros((len(token_ids), residual.shape[1]))
        hidden[step.decoder_rows] = residual
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, vocab_size] for rows of `forward`'s result."""
        return self._lm_head(self._ops.norm(hidden, self._decoder.final_norm)).to(torch.float32)

    def _encode(self, token_ids: Tensor, lengths: tuple[int, ...]) -> Rows:
        """What cross-attention projects its keys and values from: [num prompt tokens, hidden_size]."""
        ops, encoder = self._ops, self._encoder
        residual = self._embed[token_ids]
        for layer in encoder.layers:
            qkv = self._heads(layer.own.qkv(ops.norm(residual, layer.own.norm)), 3)
            mixed = attend_prompts(qkv.permute(1, 2, 0, 3), lengths, encoder.bias)
            residual = layer.own.o.add_to(residual, ops.rows(mixed.flatten(1)))
            residual = layer.mlp.add_to(residual, ops.norm(residual, layer.mlp_norm))
        return ops.norm(residual, encoder.final_norm)

    def _decode(self, index: int, residual: Tensor, prompts: Rows | None, step: Step, masks: list[Tensor]) -> Tensor:
        ops, layer, layer_cache = self._ops, self._decoder.layers[index], self._cache.layer(index)
        queries, keys, values = self._heads(layer.own.qkv(ops.norm(residual, layer.own.norm)), 3).unbind(1)
        self._attention.write(keys, values, layer_cache, step.decoder_slots)
        mixed = torch.empty_like(queries)
        for group, mask in zip(step.groups, masks, strict=True):
            mixed[group.rows] = attend_own(queries, layer_cache, group, mask)
        residual = layer.own.o.add_to(residual, ops.rows(mixed.flatten(1)))
        assert layer.cross is not None
        residual = self._cross(layer.cross, layer_cache, residual, prompts, step)
        return layer.mlp.add_to(residual, ops.norm(residual, layer.mlp_norm))

    def _cross(
        self, cross: CrossLayer, layer_cache: Tensor, residual: Tensor, prompts: Rows | None, step: Step
    ) -> Tensor:
        (queries,) = self._heads(cross.q(self._ops.norm(residual, cross.norm)), 1).unbind(1)
        keys = values = queries[:0]
        if prompts is not None:
            keys, values = self._heads(cross.kv(prompts), 2).unbind(1)
        mixed = self._attention.attend(queries, keys, values, layer_cache, None, step.cross)
        return cross.o.add_to(residual, self._ops.rows(mixed.flatten(1)))

    def _heads(self, projected: Tensor, count: int) -> Tensor:
        # -> [rows, count, num_heads, head_dim]
        return projected.view(len(projected), count, self.config.num_heads, self.config.head_dim)


class _Parts:
    """Takes layers out of the parameters."""

    def __init__(self, config: EncoderDecoderConfig, parameters: dict[str, Tensor], ops: Ops) -> None:
        self._config = config
        self._parameters = parameters
        self._ops = ops

    def stack(self, name: str, num_layers: int) -> Stack:
        weight = self._parameters.pop(f"{name}.distances")
        bias = PositionBias(weight, self._config.max_distance, both_directions=name == "encoder")
        layers = [self._layer(f"{name}.{index}", has_cross=name == "decoder") for index in range(num_layers)]
        return Stack(layers, bias, self._norm(f"{name}.final_norm"))

    def _layer(self, name: str, *, has_cross: bool) -> Layer:
        config = self._config
        qkv, o = (self._linear(f"{name}.self.{part}") for part in ("qkv", "o"))
        own = SelfLayer(self._norm(f"{name}.self.norm"), qkv, o)
        up, down = self._linear(f"{name}.mlp.up"), self._linear(f"{name}.mlp.down")
        mlp = DenseMlp(up, down, ACTIVATIONS[config.activation], self._ops, gated=config.gated)
        return Layer(own, self._cross(f"{name}.cross") if has_cross else None, self._norm(f"{name}.mlp.norm"), mlp)

    def _cross(self, name: str) -> CrossLayer:
        return CrossLayer(self._norm(f"{name}.norm"), *(self._linear(f"{name}.{part}") for part in ("q", "kv", "o")))

    def _norm(self, name: str) -> Norm:
        return Norm(self._parameters.pop(name), None, self._config.norm_eps)

    def _linear(self, name: str) -> LinearLayer:
        return self._ops.linear(self._parameters.pop(name), None)
