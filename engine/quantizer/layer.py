"""A layer of a Llama-like decoder in fp32, which computes whole prompts and tells what its matrices multiply."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.encodings import Parameters
from engine.models.linear import rms_norm
from engine.models.model_config import ModelConfig
from engine.models.rope import RotaryEmbedding, rotate

MATRICES = ("qkv", "o", "gate_up", "down")
_NORMS = ("input_norm", "post_norm", "q_norm", "k_norm")

Observe = Callable[[str, Tensor], None]
"""Receives the name of a matrix and its inputs [tokens, inputs]."""
RoundRows = Callable[[Tensor], Tensor]


_PACK_TOKENS = 1024
"""Prompts go through a layer together, because threads mostly wait for each other in operations on few tokens."""


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """Whole prompts one after the other. Each token has an id, the number of its prompt, its position, and the length
    of its prompt; all [tokens].
    """

    token_ids: Tensor
    prompts: Tensor
    positions: Tensor
    lengths: Tensor

    def seen(self, window: int | None) -> Tensor:
        """Which tokens each token attends to: [tokens, tokens]."""
        distance = self.positions[:, None] - self.positions
        seen = (distance >= 0) & (self.prompts[:, None] == self.prompts)
        return seen if window is None else seen & (distance < window)


def pack_prompts(prompts: Sequence[Sequence[int]]) -> Iterator[PackedPrompts]:
    """Pack prompts in their order; a longer one than _PACK_TOKENS is alone."""
    waiting: list[Sequence[int]] = []
    for prompt in prompts:
        if waiting and sum(map(len, waiting)) + len(prompt) > _PACK_TOKENS:
            yield _pack(waiting)
            waiting = []
        waiting.append(prompt)
    if waiting:
        yield _pack(waiting)


def _pack(prompts: Sequence[Sequence[int]]) -> PackedPrompts:
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return PackedPrompts(
        torch.tensor([token_id for prompt in prompts for token_id in prompt]),
        torch.arange(len(prompts)).repeat_interleave(lengths),
        torch.cat([torch.arange(len(prompt)) for prompt in prompts]),
        lengths.repeat_interleave(lengths),
    )


@dataclass(frozen=True, slots=True)
class FloatLayer:
    """The parameters of layer `index` in fp32: `matrices` [outputs, inputs] by the names in MATRICES, `biases` by the
    same names, `vectors` of norms. engine/models/parameters.py says which rows of a matrix are which.
    """

    config: ModelConfig
    index: int
    matrices: dict[str, Tensor]
    biases: dict[str, Tensor]
    vectors: dict[str, Tensor]

    def with_matrices(self, matrices: Mapping[str, Tensor]) -> "FloatLayer":
        return FloatLayer(self.config, self.index, dict(matrices), self.biases, self.vectors)

    def forward(
        self,
        residual: Tensor,
        pack: PackedPrompts,
        rope: RotaryEmbedding,
        observe: Observe | None = None,
        round_rows: RoundRows | None = None,
    ) -> Tensor:
        """The residual [tokens, hidden_size] of whole prompts after this layer.

        `observe` sees the inputs of matrices, before `round_rows` rounds them.
        """

        def product(name: str, x: Tensor) -> Tensor:
            if observe is not None:
                observe(name, x)
            return F.linear(x if round_rows is None else round_rows(x), self.matrices[name], self.biases.get(name))

        mixed = self._attend(product("qkv", self._norm("input_norm", residual)), pack, rope)
        residual = residual + product("o", mixed)
        gate, up = product("gate_up", self._norm("post_norm", residual)).chunk(2, -1)
        return residual + product("down", F.silu(gate) * up)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.vectors[name], self.config.norm_eps)

    def _attend(self, qkv: Tensor, pack: PackedPrompts, rope: RotaryEmbedding) -> Tensor:
        """Causal attention within the layer's window: [tokens, num_heads * head_dim]."""
        config = self.config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        queries, keys = heads[:, : config.num_heads], heads[:, config.num_heads : -config.num_kv_heads]
        values = heads[:, -config.num_kv_heads :]
        if config.qk_norm:
            queries, keys = self._norm("q_norm", queries), self._norm("k_norm", keys)
        rotation = rope.cos_sin(pack.positions, pack.lengths)
        queries, keys = rotate(queries, *rotation), rotate(keys, *rotation)
        queries, keys, values = queries.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1)
        seen = pack.seen(config.windows[self.index])
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
        return mixed.transpose(0, 1).flatten(1)


def take_float_layer(parameters: Parameters, index: int, config: ModelConfig) -> FloatLayer:
    """Take the parameters of layer `index`. Raises ConfigurationError."""
    prefix = f"layers.{index}."
    linears = {name: parameters.take_linear(prefix + name) for name in MATRICES}
    return FloatLayer(
        config,
        index,
        {name: linear.weight for name, linear in linears.items()},
        {name: linear.bias for name, linear in linears.items() if linear.bias is not None},
        {name: parameters.take(prefix + name) for name in _NORMS if config.qk_norm or name not in ("q_norm", "k_norm")},
    )
