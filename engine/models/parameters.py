"""Which tensors of a checkpoint make up which parameters of the decoder, and in which order their rows are taken.

Query, key and value projections become one matrix, and gate and up become one, so that a layer is four matrix
products. Every layout of a checkpoint is a choice of rows: fused projections, and rotary dimensions paired otherwise
than ours, come out as one and the same, and the decoder knows nothing of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.models.facts import BLOCKS, ModelConfig
from engine.models.rope_config import rotary_order

RowOrder = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A tensor of the checkpoint and its shape there. `rows` are the rows taken from it, all in order if None; if it is
    `transposed`, these are columns.
    """

    name: str
    shape: tuple[int, ...]
    rows: RowOrder | None = None
    transposed: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the parameter that it fills."""
        return self.shape[-1 if self.transposed else 0] if self.rows is None else len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterSpec:
    """One parameter: its sources stacked along dimension 0, times `factor`, plus `offset`; with `unit_rows`, each row
    divided by its length.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    factor: float = 1.0
    offset: float = 0.0
    unit_rows: bool = False

    @property
    def is_scale(self) -> bool:
        """True for the weights of norms, which are near 1 rather than near 0."""
        return self.name.endswith("norm")


def parameter_specs(config: ModelConfig) -> list[ParameterSpec]:
    """Every parameter of the model; a tied output matrix is not listed."""
    names, hidden, vocab = config.tensors, config.hidden_size, config.vocab_size
    model = _Place(config, "", "")
    model.add("embed", (vocab, hidden), [Source(f"{names.embed}.weight", (vocab, hidden))])
    if config.positions == "learned":
        end = config.max_position_embeddings + names.first_position
        table = Source(f"{names.positions}.weight", (end, hidden), np.arange(names.first_position, end))
        model.add("positions", (config.max_position_embeddings, hidden), [table])
    if config.embed_norm:
        model.norm("embed_norm", names.embed_norm)
    model.norm("final_norm", names.final_norm)
    if not config.tied:
        stored = Source(f"{names.lm_head}.weight", (vocab, hidden))
        model.specs.append(ParameterSpec("lm_head", (vocab, hidden), (stored,), unit_rows=names.unit_lm_head))
    if config.lm_head_bias:
        model.add("lm_head_bias", (vocab,), [Source(f"{names.lm_head}.bias", (vocab,))])
    specs = model.specs
    for layer in range(config.num_layers):
        specs += _layer_specs(config, layer)
    return specs


def _layer_specs(config: ModelConfig, layer: int) -> list[ParameterSpec]:
    names, experts = config.tensors, config.experts
    place = _Place(config, f"layers.{layer}.", names.layer.format(layer) + ".")
    for norm in BLOCKS[config.block]:
        place.norm(norm, getattr(names, norm))
    _add_attention(place, config)
    if experts is None or not experts.layers[layer]:
        place.mlp(names.up, names.down, config.intermediate_size)
        return place.specs
    router = (experts.num_experts, config.hidden_size)
    place.add("router", router, [Source(f"{place.source}{names.router}.weight", router)])
    for expert in range(experts.num_experts):
        part = place.inside(f"experts.{expert}.", names.expert.format(expert) + ".")
        part.mlp(names.expert_up, names.expert_down, experts.intermediate_size)
    if experts.shared_size:
        part = place.inside("shared.", f"{names.shared_expert}.")
        part.mlp(names.expert_up, names.expert_down, experts.shared_size)
    if experts.shared_gate:
        gate = (1, config.hidden_size)
        place.add("shared_gate", gate, [Source(f"{place.source}{names.shared_gate}.weight", gate)])
    return place.specs


def _add_attention(place: "_Place", config: ModelConfig) -> None:
    names, head_dim = config.tensors, config.head_dim
    order = np.arange(head_dim)
    if config.positions == "rotary":
        order = np.array(rotary_order(head_dim, config.rope.dim, interleaved=names.interleaved_rotary))
    parts = [
        (name, num_rows, None if np.array_equal(rows, np.arange(num_rows)) else rows)
        for name, num_rows, rows in _qkv_parts(config, order)
    ]
    place.linear("qkv", parts, config.hidden_size, has_bias=config.qkv_bias)
    if config.qk_norm:
        for which, name in (("q_norm", names.q_norm), ("k_norm", names.k_norm)):
            stored = Source(f"{place.source}{name}.weight", (head_dim,), order)
            place.add(which, (head_dim,), [stored], offset=names.norm_offset)
    whole = [(names.o, config.hidden_size, None)]
    place.linear("o", whole, config.num_heads * head_dim, has_bias=config.o_bias, factor=config.residual_scale)


def _qkv_parts(config: ModelConfig, order: RowOrder) -> list[tuple[str, int, RowOrder]]:
    """Tensors with the number of their rows and which are taken, so that all queries come first, then keys, then
    values; `order` is that of the dimensions of a query or key.
    """
    names, heads, kv_heads, head_dim = config.tensors, config.num_heads, config.num_kv_heads, config.head_dim
    if len(names.qkv) == 3:
        q, k, v = names.qkv
        return [
            (q, heads * head_dim, _rows_of_heads(np.arange(heads), order)),
            (k, kv_heads * head_dim, _rows_of_heads(np.arange(kv_heads), order)),
            (v, kv_heads * head_dim, np.arange(kv_heads * head_dim)),
        ]
    stored = np.arange(heads + 2 * kv_heads)  # heads, in the order of the one tensor
    if names.grouped_qkv:
        groups = stored.reshape(kv_heads, config.group_size + 2)
        stored = np.concatenate((groups[:, :-2].ravel(), groups[:, -2], groups[:, -1]))
    rotated, values = stored[: heads + kv_heads], stored[heads + kv_heads :]
    rows = np.concatenate((_rows_of_heads(rotated, order), _rows_of_heads(values, np.arange(head_dim))))
    return [(names.qkv[0], len(rows), rows)]


def _rows_of_heads(heads: NDArray[np.int64], order: RowOrder) -> RowOrder:
    rows: RowOrder = (heads[:, None] * len(order) + order).ravel()
    return rows


class _Place:
    """Collects the parameters of the whole model, a layer or an expert, under the prefixes of ours and of theirs."""

    def __init__(self, config: ModelConfig, target: str, source: str, specs: list[ParameterSpec] | None = None) -> None:
        self.specs: list[ParameterSpec] = [] if specs is None else specs
        self.source = source
        self._config = config
        self._target = target

    def inside(self, target: str, source: str) -> "_Place":
        """A place within this one."""
        return _Place(self._config, self._target + target, self.source + source, self.specs)

    def add(
        self, name: str, shape: tuple[int, ...], sources: Sequence[Source], factor: float = 1.0, offset: float = 0.0
    ) -> None:
        """One parameter."""
        self.specs.append(ParameterSpec(self._target + name, shape, tuple(sources), factor, offset))

    def norm(self, name: str, stem: str) -> None:
        """A norm of the residual."""
        shape = (self._config.hidden_size,)
        self.add(name, shape, [Source(f"{self.source}{stem}.weight", shape)], offset=self._config.tensors.norm_offset)
        if self._config.norm_bias:
            self.add(f"{name}_bias", shape, [Source(f"{self.source}{stem}.bias", shape)])

    def linear(
        self,
        name: str,
        parts: Sequence[tuple[str, int, RowOrder | None]],
        inputs: int,
        *,
        has_bias: bool,
        factor: float = 1.0,
    ) -> None:
        """A projection; `parts`: tensors with the number of their rows and which of these are taken."""
        transposed, outputs = self._config.tensors.transposed, sum(num_rows for _, num_rows, _ in parts)
        weights = [
            Source(f"{self.source}{stem}.weight", (inputs, n) if transposed else (n, inputs), rows, transposed)
            for stem, n, rows in parts
        ]
        self.add(name, (outputs, inputs), weights, factor)
        if has_bias:
            biases = [Source(f"{self.source}{stem}.bias", (n,), rows) for stem, n, rows in parts]
            self.add(f"{name}_bias", (outputs,), biases, factor)

    def mlp(self, up: tuple[str, ...], down: str, inner: int) -> None:
        """An MLP, or one expert."""
        config = self._config
        outputs = 2 * inner if config.gated else inner
        ups = [(stem, outputs // len(up), None) for stem in up]
        self.linear("gate_up" if config.gated else "up", ups, config.hidden_size, has_bias=config.mlp_bias)
        downs = [(down, config.hidden_size, None)]
        self.linear("down", downs, inner, has_bias=config.mlp_bias, factor=config.residual_scale)
