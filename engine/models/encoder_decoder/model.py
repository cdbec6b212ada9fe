"""EncoderDecoder: computes the prompt and the decoder's tokens in one step, and writes the KV of both.

It implements Model, like Decoder, and knows no sequences, blocks or sampling. The encoder's layers run first, then the
decoder's. Each decoder layer first projects the encoder's output to its own keys and values. So the KV is completed
layer by layer, and a prefill worker can send it while later layers are computed.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.attention.backend import ForwardMetadata
from engine.model import DecoderMemory, Finish, LayerGroups
from engine.models.activations import ACTIVATIONS
from engine.models.encoder_decoder.config import EncoderDecoderConfig
from engine.models.encoder_decoder.step import PositionBias, Step, attend_own, attend_prompts, causal_bias, plan_step
from engine.models.encodings import Parameters
from engine.models.layer import DenseMlp
from engine.models.linear import LinearLayer, Rows, make_linear
from engine.models.norms import Norm
from engine.sampling.host_rows import rows_for
from engine.sampling.row_math import Logits, RowMath
from mesh.domain.host import Cores


@dataclass(frozen=True, slots=True)
class SelfLayer:
    """Norm and projections of a layer's self-attention."""

    norm: Norm
    qkv: LinearLayer
    o: LinearLayer


@dataclass(frozen=True, slots=True)
class CrossLayer:
    """Norm and projections of a decoder layer's cross-attention to the prompt."""

    norm: Norm
    q: LinearLayer
    kv: LinearLayer
    o: LinearLayer


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; `cross` is None in the encoder."""

    self_attention: SelfLayer
    cross: CrossLayer | None
    mlp_norm: Norm
    mlp: DenseMlp


@dataclass(frozen=True, slots=True)
class Stack:
    """All layers of the encoder or the decoder."""

    layers: list[Layer]
    bias: PositionBias
    final_norm: Norm


class EncoderDecoder:
    """An encoder-decoder transformer. The constructor takes all parameters."""

    phase_cycles = None
    borrows_cores = False

    def __init__(self, config: EncoderDecoderConfig, parameters: Parameters, memory: DecoderMemory) -> None:
        self.config = config
        self.num_torch_threads = torch.get_num_threads()
        self._cache, self._attention = memory.cache, memory.attention
        self._embed = parameters.take("embed")
        self._residual_dtype = torch.float32 if self._embed.dtype is torch.float16 else self._embed.dtype
        self._lm_head = make_linear(parameters.take_output(self._embed))
        builder = _StackBuilder(config, parameters)
        self._encoder = builder.stack("encoder", config.num_encoder_layers)
        self._decoder = builder.stack("decoder", config.num_layers)

    @property
    def attention_backend(self) -> str:
        """Name of the backend for cross-attention."""
        return self._attention.name

    @cached_property
    def row_math(self) -> RowMath:
        return rows_for(self._embed.device)

    def use_cores(self, lent: Cores) -> None:
        """Ignores lent cores, like Decoder."""

    def begin(self, token_ids: Tensor, metadata: ForwardMetadata, layer_groups: LayerGroups) -> Finish:
        hidden = self._forward(token_ids, metadata, layer_groups)
        return lambda: hidden

    def _forward(self, token_ids: Tensor, metadata: ForwardMetadata, layer_groups: LayerGroups) -> Tensor:
        """Only the decoder's tokens have hidden states; rows of the encoder's tokens are zero."""
        step = plan_step(metadata, self._cache.layout.block_size)
        prompts = self._encode(token_ids[step.encoder_rows], step.lengths) if step.lengths else None
        masks = [causal_bias(group, self._decoder.bias) for group in step.groups]
        residual = self._embedded(token_ids[step.decoder_rows])  # [num decoder tokens, hidden_size]
        for first, stop in layer_groups:
            for index in range(first, stop):
                residual = self._decode(index, residual, prompts, step, masks)
        if prompts is None:
            return residual
        hidden = residual.new_zeros((len(token_ids), residual.shape[1]))
        hidden[step.decoder_rows] = residual
        return hidden

    def logits(self, hidden: Tensor) -> Logits:
        return Logits(self._lm_head(self._lm_head.ops.norm(hidden, self._decoder.final_norm)).to(torch.float32))

    def _embedded(self, token_ids: Tensor) -> Tensor:
        return self._embed[token_ids].to(self._residual_dtype)

    def _encode(self, token_ids: Tensor, lengths: tuple[int, ...]) -> Rows:
        """The normed encoder output [num prompt tokens, hidden_size], as input rows of the cross-attention's `kv`."""
        encoder = self._encoder
        residual = self._embedded(token_ids)
        for layer in encoder.layers:
            attention = layer.self_attention
            qkv = self._heads(attention.qkv(attention.qkv.ops.norm(residual, attention.norm)), 3)
            mixed = attend_prompts(qkv.permute(1, 2, 0, 3), lengths, encoder.bias)
            residual = attention.o.add_to(residual, attention.o.ops.rows(mixed.flatten(1)))
            residual = layer.mlp.add_to(residual, layer.mlp.ops.norm(residual, layer.mlp_norm))
        cross = self._decoder.layers[0].cross
        assert cross is not None
        return cross.kv.ops.norm(residual, encoder.final_norm)

    def _decode(self, index: int, residual: Tensor, prompts: Rows | None, step: Step, masks: list[Tensor]) -> Tensor:
        layer, layer_cache = self._decoder.layers[index], self._cache.layer(index)
        attention = layer.self_attention
        qkv = self._heads(attention.qkv(attention.qkv.ops.norm(residual, attention.norm)), 3)
        queries, keys, values = qkv.unbind(1)
        self._attention.write(keys, values, layer_cache, step.decoder_slots)
        mixed = torch.empty_like(queries)
        for group, mask in zip(step.groups, masks, strict=True):
            mixed[group.rows] = attend_own(queries, layer_cache, group, mask)
        residual = attention.o.add_to(residual, attention.o.ops.rows(mixed.flatten(1)))
        assert layer.cross is not None
        residual = self._cross(layer.cross, layer_cache, residual, prompts, step)
        return layer.mlp.add_to(residual, layer.mlp.ops.norm(residual, layer.mlp_norm))

    def _cross(
        self, cross: CrossLayer, layer_cache: Tensor, residual: Tensor, prompts: Rows | None, step: Step
    ) -> Tensor:
        (queries,) = self._heads(cross.q(cross.q.ops.norm(residual, cross.norm)), 1).unbind(1)
        keys = values = queries[:0]
        if prompts is not None:
            keys, values = self._heads(cross.kv(prompts), 2).unbind(1)
        mixed = self._attention.attend(queries, keys, values, layer_cache, None, step.cross)
        return cross.o.add_to(residual, cross.o.ops.rows(mixed.flatten(1)))

    def _heads(self, projected: Tensor, count: int) -> Tensor:
        # -> [rows, count, num_heads, head_dim]
        return projected.view(len(projected), count, self.config.num_heads, self.config.head_dim)


class _StackBuilder:
    """Builds the encoder and the decoder from the parameters."""

    def __init__(self, config: EncoderDecoderConfig, parameters: Parameters) -> None:
        self._config = config
        self._parameters = parameters

    def stack(self, name: str, num_layers: int) -> Stack:
        weight = self._parameters.take(f"{name}.distances")
        bias = PositionBias(weight, self._config.max_distance, both_directions=name == "encoder")
        layers = [self._layer(f"{name}.{index}", has_cross=name == "decoder") for index in range(num_layers)]
        return Stack(layers, bias, self._norm(f"{name}.final_norm"))

    def _layer(self, name: str, *, has_cross: bool) -> Layer:
        config = self._config
        qkv, o = (self._linear(f"{name}.self.{part}") for part in ("qkv", "o"))
        self_attention = SelfLayer(self._norm(f"{name}.self.norm"), qkv, o)
        up, down = self._linear(f"{name}.mlp.up"), self._linear(f"{name}.mlp.down")
        mlp = DenseMlp(up, down, ACTIVATIONS[config.activation], gated=config.gated)
        cross = self._cross(f"{name}.cross") if has_cross else None
        return Layer(self_attention, cross, self._norm(f"{name}.mlp.norm"), mlp)

    def _cross(self, name: str) -> CrossLayer:
        return CrossLayer(self._norm(f"{name}.norm"), *(self._linear(f"{name}.{part}") for part in ("q", "kv", "o")))

    def _norm(self, name: str) -> Norm:
        return Norm(self._parameters.take(name), None, self._config.norm_eps)

    def _linear(self, name: str) -> LinearLayer:
        return make_linear(self._parameters.take_linear(name))
