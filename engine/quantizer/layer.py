"""A layer of any decoder-only family in fp32, which computes whole prompts and tells what its matrices multiply."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.backend import attention_shape
from engine.attention.torch_sdpa import TorchAttention
from engine.models.activations import Activation
from engine.models.encodings import LinearParameters, Parameters
from engine.models.layer import Experts, Mlp, SharedExpert, run_layer, take_layer
from engine.models.linear import FloatOps
from engine.models.model_config import ModelConfig
from engine.models.per_layer import take_sized_layer
from engine.models.recurrent.mixer import RecurrentMixer
from engine.models.rope import RotaryEmbedding, rope_of_layer
from engine.models.rounding import one_thread
from engine.quantizer.grids import RoundRows

Observe = Callable[[str, Tensor], None]
"""Receives the name of a matrix and its inputs [tokens, inputs]."""
KeptKV = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of layers whose KV later ones read, by the layer."""

_PACK_TOKENS = 1024
"""Prompts up to this many tokens go through a layer together: in small operations threads mostly wait for each other.
"""
_OTHER_PROMPT = -1


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """Whole prompts, concatenated. Each token has an id, the number of its prompt, its position, and the length
    of its prompt; all [tokens].
    """

    token_ids: Tensor
    prompts: Tensor
    positions: Tensor
    lengths: Tensor

    def distances(self) -> Tensor:
        """The distance from each token to each token, below 0 for later ones and those of other prompts: [tokens,
        tokens].
        """
        distances = self.positions[:, None] - self.positions
        return distances.masked_fill_(self.prompts[:, None] != self.prompts, _OTHER_PROMPT)


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


class _OneThreadOps(FloatOps):
    """Activations in one thread. torch computes the last numbers of each thread's share by other code, which rounds
    otherwise, so with more threads the files would depend on their number.
    """

    def activated(self, activation: Activation, x: Tensor) -> Tensor:
        with one_thread():
            return super().activated(activation, x)

    def gated(self, activation: Activation, gate_up: Tensor) -> Tensor:
        with one_thread():
            return super().gated(activation, gate_up)


class FloatLinear:
    """A matrix in fp32 that may be replaced, and its bias. `factor` multiplies the product; the file has the matrix
    without it. `observe` sees the inputs, before `round_rows` rounds them.
    """

    ops = _OneThreadOps(torch.float32)

    def __init__(self, name: str, parameters: LinearParameters, factor: float) -> None:
        self.name = name
        self.weight = parameters.weight
        self.bias = parameters.bias
        self.observe: Observe | None = None
        self.round_rows: RoundRows | None = None
        self._factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        if self.observe is not None:
            self.observe(self.name, x)
        x = x if self.round_rows is None else self.round_rows(x)
        product = F.linear(x, self.weight, self.bias)
        return product if self._factor == 1.0 else product * self._factor

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


class _FloatLinears:
    """Makes the matrices of a layer (engine.models.layer.LinearLayers), by the last parts of their names. It refers to
    no layer, so that a layer is freed as soon as it is done with.
    """

    def __init__(self, index: int, product_factors: Mapping[str, float]) -> None:
        self.made: dict[str, FloatLinear] = {}
        self._prefix = f"layers.{index}."
        self._factors = product_factors

    def make_linear(self, name: str, parameters: LinearParameters) -> FloatLinear:
        short = name.removeprefix(self._prefix)
        self.made[short] = linear = FloatLinear(short, parameters, self._factors.get(name, 1.0))
        return linear

    def among(self, chosen: Tensor) -> AbstractContextManager[None]:
        return nullcontext()


def _routers(mlp: Mlp | None) -> dict[str, Tensor]:
    """By the last parts of their names."""
    if isinstance(mlp, SharedExpert):
        gate = {} if mlp.gate is None else {"shared_gate": mlp.gate}
        return _routers(mlp.experts) | gate
    return {"router": mlp.router.weight} if isinstance(mlp, Experts) else {}


class FloatLayer:
    """Layer `index` in fp32, whose matrices are those of the file; `product_factors` are by the names of parameters.
    Takes its parameters. Raises ConfigurationError.

    `linears` are the matrices by name: qkv, o, gate_up or up, down, and those of experts as experts.3.down; a recurrent
    layer has recurrent_in and recurrent_out in place of qkv and o, and one with an input of its own also has input_gate
    and input_projection.
    engine/models/parameters.py says which rows of a matrix are which. `routers`: the router of experts and the gate of
    a shared expert, which read what experts read and are not quantised. `changed`: norms, biases and routers that
    differ from the file's, in the form of the file except for the order of rows.
    """

    def __init__(
        self, parameters: Parameters, index: int, config: ModelConfig, product_factors: Mapping[str, float]
    ) -> None:
        linears = _FloatLinears(index, product_factors)
        self.config = config
        self.index = index
        self.layer = take_layer(parameters, index, config, None, linears)
        has_sizes = config.per_layer is not None
        self._sized_layer = take_sized_layer(parameters, index, config, linears, self.layer) if has_sizes else None
        self.linears: Mapping[str, FloatLinear] = linears.made
        self.routers = _routers(self.layer.mlp)
        self.changed: dict[str, Tensor] = {}
        self._heads = attention_shape(config.of_layer(index))
        self._attention = TorchAttention(self._heads)

    def forward(
        self,
        residual: Tensor,
        pack: PackedPrompts,
        ropes: Sequence[RotaryEmbedding],
        kept: KeptKV,
        inputs: Tensor | None = None,
        observe: Observe | None = None,
        round_rows: RoundRows | None = None,
    ) -> Tensor:
        """The residual [tokens, hidden_size] of whole prompts after this layer. `ropes`: see ropes_of; `inputs`: what
        the layer adds for the tokens themselves [tokens, width].

        `observe` sees the inputs of matrices, before `round_rows` rounds them.
        """
        for linear in self.linears.values():
            linear.observe, linear.round_rows = observe, round_rows
        rotation = None
        if ropes:
            with one_thread():  # as in _OneThreadOps
                rotation = ropes[rope_of_layer(self.config, self.index)].rotation(pack.positions, pack.lengths)
        attend, recur = partial(self._attend, pack, kept), partial(_recur, pack)
        if self._sized_layer is not None:
            return self._sized_layer(residual, rotation, attend, inputs)
        return run_layer(self.layer, self._heads, residual, rotation, attend, recur)

    def _attend(self, pack: PackedPrompts, kept: KeptKV, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        window, facts = self.config.windows[self.index], self.config.per_layer
        if facts is not None and not self.config.stores_kv(self.index):
            keys, values = kept[facts.layers[self.index].kv_source]
        elif facts is not None and self.index in facts.read_later:
            kept[self.index] = keys, values
        mixed = self._attention.attend_whole(queries, keys, values, pack.distances(), window, self.layer.sinks)
        return mixed.flatten(1)


def _recur(pack: PackedPrompts, mixer: RecurrentMixer, rows: Tensor) -> Tensor:
    return mixer.whole(rows, torch.unique_consecutive(pack.prompts, return_counts=True)[1].tolist())
