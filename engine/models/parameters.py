"""Maps the tensors of a checkpoint to the parameters of the decoder: merged matrices, and the order of their rows.

Query, key and value projections are merged to one matrix, gate and up projections to another, so a layer needs four
matrix products. Differences in layout, such as fused projections or another pairing of rotary dimensions, are handled
here by the order of rows; the decoder has one layout only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.models.blocks import BLOCKS, OUT_NORMS, has_attention, has_mlp
from engine.models.latent_config import LatentConfig
from engine.models.model_config import ModelConfig
from engine.models.per_layer_parameters import add_per_layer
from engine.models.recurrent.parameters import add_recurrent
from engine.models.row_orders import heads_of_one_tensor, rotary_order
from mesh.domain.kv import Span

RowOrder = NDArray[np.int64]


class Stack(NamedTuple):
    """A tensor [members, rows, columns] that a checkpoint may have instead of a source: the source is the member's rows
    from `first_row` on. If it `may_be_transposed`, it may also be [members, columns, rows].
    """

    name: str
    shape: tuple[int, int, int]
    member: int
    first_row: int
    may_be_transposed: bool


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A tensor of the checkpoint that fills rows of a parameter."""

    name: str
    shape: tuple[int, ...]  # as it is stored
    rows: RowOrder | None = None  # selects and orders its rows; None: all in order
    transposed: bool = False  # `rows` selects columns
    flat: bool = False  # `rows` selects single numbers, counted through all rows
    member: int | None = None  # the number of this one, if the tensor stacks several matrices or vectors
    stack: Stack | None = None  # a tensor that the checkpoint may have instead

    @property
    def num_rows(self) -> int:
        """Number of rows that this source fills in its parameter."""
        if self.rows is not None:
            return len(self.rows)
        own = self.shape if self.member is None else self.shape[1:]
        return own[-1 if self.transposed else 0]


@dataclass(frozen=True, slots=True, eq=False)
class ParameterSpec:
    """One parameter: its sources stacked along dimension 0, times `factor`, plus `offset`; no sources count as 0."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    factor: float = 1.0
    offset: float = 0.0
    unit_rows: bool = False  # each row is divided by its length
    is_matrix: bool = False  # is multiplied and has an encoding, unlike the embedding, norms and biases
    wide: bool = False  # stays in fp32 if the model is in fp16
    in_fp32: bool = False  # always in fp32
    held_rows: RowOrder | None = None  # rows that a rank holds, a matrix's outputs; None: all
    held_inputs: Span | None = None  # inputs that a rank holds; None: all
    is_held: bool = True  # False: the rank holds nothing of it

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Shape of the part that this rank holds."""
        num_rows = self.shape[0] if self.held_rows is None else len(self.held_rows)
        return (num_rows, *self.shape[1:]) if self.held_inputs is None else (num_rows, self.held_inputs.count)

    @property
    def input_slice(self) -> slice:
        """The inputs that this rank holds, as an index of a matrix's last dimension."""
        return slice(None) if self.held_inputs is None else slice(self.held_inputs.first, self.held_inputs.end)

    def held_sources(self) -> Iterator[Source]:
        """The sources, restricted to the rows that this rank holds."""
        first = 0
        for source in self.sources:
            if self.held_rows is None:
                yield source
                continue
            local = self.held_rows[(self.held_rows >= first) & (self.held_rows < first + source.num_rows)] - first
            yield replace(source, rows=local if source.rows is None else source.rows[local])
            first += source.num_rows

    @property
    def is_scale(self) -> bool:
        """True for the weights of norms, which are close to 1 rather than 0."""
        return self.name.endswith(("norm", "scalar"))


def parameter_specs(config: ModelConfig) -> list[ParameterSpec]:
    """Every parameter of the model; a tied output matrix is not listed."""
    names, hidden, vocab, width = config.tensors, config.hidden_size, config.vocab_size, config.embed_width
    model = SpecBuilder(config, "", "")
    model.add("embed", (vocab, width), [Source(f"{names.embed}.weight", (vocab, width))])
    if width != hidden:
        model.linear("project_in", [(names.project_in, hidden, None)], width, has_bias=False)
        model.linear("project_out", [(names.project_out, width, None)], hidden, has_bias=False)
    if config.positions == "learned":
        num_rows = config.max_position_embeddings + names.first_position
        table = Source(f"{names.positions}.weight", (num_rows, hidden), np.arange(names.first_position, num_rows))
        model.add("positions", (config.max_position_embeddings, hidden), [table])
    if config.embed_norm:
        model.norm("embed_norm", names.embed_norm)
    if config.final_norm:
        model.norm("final_norm", names.final_norm)
    if not config.tied:
        stored, unit = (Source(f"{names.lm_head}.weight", (vocab, width)),), names.unit_lm_head
        model.specs.append(ParameterSpec("lm_head", (vocab, width), stored, unit_rows=unit, is_matrix=True))
    if config.lm_head_bias:
        model.add("lm_head_bias", (vocab,), [Source(f"{names.lm_head}.bias", (vocab,))])
    for layer in range(config.num_layers):
        model.specs += _layer_specs(config.of_layer(layer), layer)
    if config.per_layer is not None:
        add_per_layer(model, config)
    return model.specs


def tied_names(config: ModelConfig) -> tuple[str, str] | None:
    """Names of the output matrix and the embedding if config.json says that they are equal."""
    return (f"{config.tensors.lm_head}.weight", f"{config.tensors.embed}.weight") if config.tied else None


def _layer_specs(config: ModelConfig, layer: int) -> list[ParameterSpec]:
    names, experts = config.tensors, config.experts
    builder = SpecBuilder(config, f"layers.{layer}.", names.layer.format(layer) + ".")
    for norm in BLOCKS[config.block]:
        builder.norm(norm, getattr(names, norm), config.residual_scale if norm in OUT_NORMS else 1.0)
    if config.is_recurrent(layer):
        add_recurrent(builder, config)
    if has_attention(config, layer):
        if config.latent is None:
            _add_attention(builder, config)
        else:
            _add_latent_attention(builder, config, config.latent)
        o, inputs = [(names.o, config.hidden_size, None)], config.num_heads * config.result_dim
        builder.linear("o", o, inputs, has_bias=config.o_bias, factor=config.out_factor)
        if config.sub_norms:
            builder.stored("o_norm", f"{names.o_norm}.weight", (inputs,))
    if not has_mlp(config, layer):
        return builder.specs
    if experts is None or not experts.layers[layer]:
        builder.mlp(names.up, names.down, config.intermediate_size)
        if config.sub_norms:
            builder.stored("down_norm", f"{names.down_norm}.weight", (config.intermediate_size,))
        if config.activation == "xielu":
            builder.xielu(names.xielu)
        return builder.specs
    router = (experts.num_experts, config.hidden_size)
    stored = (Source(f"{builder.source}{names.router}.weight", router),)
    builder.specs.append(ParameterSpec(builder.target + "router", router, stored, in_fp32=experts.wide_router))
    if experts.choice_bias:
        shape = (1, *router[:1]) if names.choice_bias_is_row else router[:1]
        numbers = np.arange(experts.num_experts)
        stored = (Source(f"{builder.source}{names.choice_bias}", shape, numbers, flat=True),)
        builder.specs.append(ParameterSpec(builder.target + "choice_bias", router[:1], stored, in_fp32=True))
    if experts.router_bias:
        builder.add("router_bias", router[:1], [Source(f"{builder.source}{names.router}.bias", router[:1])])
    for expert in range(experts.num_experts):
        if names.stacked_experts:
            _add_stacked(builder, config, expert)
            continue
        nested = builder.nested(f"experts.{expert}.", names.expert.format(expert) + ".", expert)
        nested.mlp(names.expert_up, names.expert_down, experts.intermediate_size)
    if experts.shared_size:
        nested = builder.nested("shared.", f"{names.shared_expert}.")
        nested.mlp(names.expert_up, names.expert_down, experts.shared_size, experts.shared_scale)
    if experts.shared_gate:
        gate = (1, config.hidden_size)
        builder.add("shared_gate", gate, [Source(f"{builder.source}{names.shared_gate}.weight", gate)])
    return builder.specs


def _add_stacked(builder: "SpecBuilder", config: ModelConfig, expert: int) -> None:
    """Add the matrices of an expert, which are a member of tensors of all experts; see TensorNames.stacked_experts."""
    names, experts, hidden = config.tensors, config.experts, config.hidden_size
    assert experts is not None
    inner, count = experts.intermediate_size, experts.num_experts
    gates_then_ups = np.arange(2 * inner).reshape(inner, 2).T.ravel()
    nested = builder.nested(f"experts.{expert}.", f"{names.expert}.")
    matrices: list[tuple[str, str, int, int, RowOrder | None]] = [
        ("gate_up", names.expert_up[0], 2 * inner, hidden, gates_then_ups),
        ("down", names.expert_down, hidden, inner, None),
    ]
    for name, stem, outputs, inputs, rows in matrices:
        stored = f"{nested.source}{stem}"
        matrix = Source(stored, (count, inputs, outputs), rows, transposed=True, member=expert)
        nested.specs.append(ParameterSpec(nested.target + name, (outputs, inputs), (matrix,), is_matrix=True))
        if config.mlp_bias:
            bias = Source(f"{stored}_bias", (count, outputs), rows, member=expert)
            nested.add(f"{name}_bias", (outputs,), [bias])


def _add_attention(builder: "SpecBuilder", config: ModelConfig) -> None:
    names, head_dim = config.tensors, config.head_dim
    order = np.arange(head_dim)
    if config.positions == "rotary" and config.per_layer is None:
        order = np.array(
            rotary_order(head_dim, config.rope.dim, interleaved=names.interleaved_rotary, swapped=names.swapped_rotary)
        )
    tensors = [
        (name, num_rows, None if np.array_equal(rows, np.arange(num_rows)) else rows)
        for name, num_rows, rows in _qkv_tensors(config, order)
        if name
    ]
    builder.linear("qkv", tensors, config.hidden_size, has_bias=config.qkv_bias)
    if config.qk_norm:
        _add_head_norm(builder, config, "q_norm", config.num_heads, order)
        _add_head_norm(builder, config, "k_norm", config.num_kv_heads, order)
    if config.attention_sinks:
        shape = (config.num_heads,)
        builder.add("sinks", shape, [Source(f"{builder.source}{names.sinks}", shape)])


def _add_latent_attention(builder: "SpecBuilder", config: ModelConfig, latent: LatentConfig) -> None:
    """Rotated dimensions come first in queries, last in the projection of KV. `key_up` and `value_up` are no matrices:
    attention multiplies heads of them, in full precision.
    """
    names, heads, rotated, plain = config.tensors, config.num_heads, config.rope.dim, latent.plain_dim
    queries, kv, kv_up = names.qkv
    turned = np.array(rotary_order(rotated, rotated, interleaved=names.interleaved_rotary))
    q_rows = _rows_of_heads(np.arange(heads), np.concatenate((plain + turned, np.arange(plain))))
    kv_rows = np.concatenate((np.arange(latent.kv_rank), latent.kv_rank + turned))
    kv_tensor = (kv, len(kv_rows), kv_rows)
    norms = [("kv_norm", names.k_norm, latent.kv_rank)]
    if latent.query_rank:
        builder.linear("qkv", [(queries, latent.query_rank, None), kv_tensor], config.hidden_size, has_bias=False)
        builder.linear("q_b", [(names.q_b, len(q_rows), q_rows)], latent.query_rank, has_bias=False)
        norms.append(("q_norm", names.q_norm, latent.query_rank))
    else:
        builder.linear("qkv", [(queries, len(q_rows), q_rows), kv_tensor], config.hidden_size, has_bias=False)
    for name, stored, width in norms:
        builder.add(name, (width,), [Source(f"{builder.source}{stored}.weight", (width,))])
    up = np.arange(heads * (plain + latent.value_dim)).reshape(heads, -1)
    for name, rows in (("key_up", up[:, :plain].ravel()), ("value_up", up[:, plain:].ravel())):
        source = Source(f"{builder.source}{kv_up}.weight", (up.size, latent.kv_rank), rows)
        builder.add(name, (len(rows), latent.kv_rank), [source])


def _add_head_norm(builder: "SpecBuilder", config: ModelConfig, name: str, num_heads: int, order: RowOrder) -> None:
    """Weights [head_dim], or [num_heads * head_dim] of heads that each have their own."""
    num_own, head_dim = 1 if config.qk_norm_of == "head" else num_heads, config.head_dim
    shape, stem = (num_own * head_dim,), f"{builder.source}{getattr(config.tensors, name)}"
    if "{}" in stem:
        stored = [Source(f"{stem.format(head)}.weight", (head_dim,), order) for head in range(num_own)]
    else:
        rows = _rows_of_heads(np.arange(num_own), order)
        own = config.qk_norm_of == "own"
        stored = [Source(f"{stem}.weight", (num_own, head_dim) if own else shape, rows, flat=own)]
    has_weight = config.qk_norm_weight
    builder.add(name, shape, stored if has_weight else (), offset=config.tensors.norm_offset if has_weight else 1.0)


def _qkv_tensors(config: ModelConfig, order: RowOrder) -> list[tuple[str, int, RowOrder]]:
    """Name, number of rows and row order of each tensor, so that all queries come first, then keys, then values.

    `order` is the order of the dimensions in the head of a query or key.
    """
    names, heads, kv_heads, head_dim = config.tensors, config.num_heads, config.num_kv_heads, config.head_dim
    if len(names.qkv) == 3:
        q, k, v = names.qkv
        q_rows = _rows_of_heads(np.arange(heads), order)
        gates: list[tuple[str, int, RowOrder]] = []
        if names.attention_gate:
            rows = np.repeat(np.arange(heads), head_dim) if names.gates_heads else np.arange(heads * head_dim)
            gates = [(names.attention_gate, heads if names.gates_heads else len(rows), rows)]
        elif config.attention_gate:  # stored are, for each head, the query and the gate; all gates follow all queries
            stored = np.arange(heads)
            of_gates = _rows_of_heads(2 * stored + 1, np.arange(head_dim))
            q_rows = np.concatenate((_rows_of_heads(2 * stored, order), of_gates))
        return [
            (q, len(q_rows), q_rows),
            *gates,
            (k, kv_heads * head_dim, _rows_of_heads(np.arange(kv_heads), order)),
            (v, kv_heads * head_dim, np.arange(kv_heads * head_dim)),
        ]
    stored = heads_of_one_tensor(heads, kv_heads, is_grouped=names.grouped_qkv, num_parts=names.qkv_parts)
    rotated, values = stored[: heads + kv_heads], stored[heads + kv_heads :]
    rows = np.concatenate((_rows_of_heads(rotated, order), _rows_of_heads(values, np.arange(head_dim))))
    return [(names.qkv[0], len(rows), rows)]


def _rows_of_heads(heads: NDArray[np.int64], order: RowOrder) -> RowOrder:
    rows: RowOrder = (heads[:, None] * len(order) + order).ravel()
    return rows


class SpecBuilder:
    """Collects the specs of the model, a layer or an expert; `target` and `source` prefix our and the stored names."""

    def __init__(
        self,
        config: ModelConfig,
        target: str,
        source: str,
        specs: list[ParameterSpec] | None = None,
        stacked: tuple[str, int] | None = None,
    ) -> None:
        """`stacked`: for an expert, the prefix of tensors that stack all experts, and its number."""
        self._stacked = stacked
        self.specs: list[ParameterSpec] = [] if specs is None else specs
        self.source = source
        self._config = config
        self.target = target

    def nested(self, target: str, source: str, expert: int | None = None) -> "SpecBuilder":
        """A builder with longer prefixes that adds to the same specs. `expert`: the number of that expert."""
        stacked = None if expert is None else (self.source, expert)
        return SpecBuilder(self._config, self.target + target, self.source + source, self.specs, stacked)

    def add(
        self, name: str, shape: tuple[int, ...], sources: Sequence[Source], factor: float = 1.0, offset: float = 0.0
    ) -> None:
        """Add a parameter that is not a matrix."""
        self.specs.append(ParameterSpec(self.target + name, shape, tuple(sources), factor, offset))

    def stored(self, name: str, stored: str, shape: tuple[int, ...], *, in_fp32: bool = False) -> None:
        """Add a parameter that is not a matrix, as one tensor has it."""
        source = Source(self.source + stored, shape)
        self.specs.append(ParameterSpec(self.target + name, shape, (source,), in_fp32=in_fp32))

    def norm(self, name: str, stem: str, factor: float = 1.0) -> None:
        """Add a norm of the residual, or of what is added to it, with its bias if any."""
        shape = (self._config.hidden_size,)
        if not self._config.norm_weight:
            self.specs.append(ParameterSpec(self.target + name, shape, (), offset=factor))
            return
        offset = factor * self._config.tensors.norm_offset
        self.add(name, shape, [Source(f"{self.source}{stem}.weight", shape)], factor, offset)
        if self._config.norm_bias:
            self.add(f"{name}_bias", shape, [Source(f"{self.source}{stem}.bias", shape)], factor)

    def linear(
        self,
        name: str,
        tensors: Sequence[tuple[str, int, RowOrder | None]],
        inputs: int,
        *,
        has_bias: bool,
        factor: float = 1.0,
    ) -> None:
        """Add a projection; `tensors`: name, number of rows and row order of each stored tensor."""
        transposed = self._config.tensors.transposed
        outputs = sum(num_rows if rows is None else len(rows) for _, num_rows, rows in tensors)
        weights = [
            Source(f"{self.source}{stem}.weight", (inputs, n) if transposed else (n, inputs), rows, transposed)
            for stem, n, rows in tensors
        ]
        if self._stacked is not None:
            weights = self._from_stack(weights, outputs, is_down=name == "down")
        shape = (outputs, inputs)
        self.specs.append(ParameterSpec(self.target + name, shape, tuple(weights), factor, is_matrix=True))
        if has_bias:
            biases = [Source(f"{self.source}{stem}.bias", (n,), rows) for stem, n, rows in tensors]
            self.add(f"{name}_bias", (outputs,), biases, factor)

    def _from_stack(self, weights: Sequence[Source], outputs: int, *, is_down: bool) -> list[Source]:
        names, experts = self._config.tensors, self._config.experts
        assert self._stacked is not None
        assert experts is not None
        (prefix, member), first, sources = self._stacked, 0, []
        for weight in weights:
            stored = prefix + (names.stacked_down if is_down else names.stacked_up)
            shape = (experts.num_experts, outputs, weight.shape[1])
            stack = Stack(stored, shape, member, first, names.stacked_transposed)
            sources.append(replace(weight, stack=stack))
            first += weight.shape[0]
        return sources

    def mlp(self, up: tuple[str, ...], down: str, inner: int, scale: float = 1.0) -> None:
        """Add the projections of an MLP or an expert with inner width `inner`. `scale`: factor of its result."""
        config = self._config
        outputs = 2 * inner if config.gated else inner
        ups = [(stem, outputs // len(up), None) for stem in up]
        name = "gate_up" if config.gated else "up"
        self.linear(name, ups, config.hidden_size, has_bias=config.mlp_bias)
        downs = [(down, config.hidden_size, None)]
        self.linear("down", downs, inner, has_bias=config.mlp_bias, factor=config.out_factor * scale)

    def xielu(self, stem: str) -> None:
        """Add the parameters of an MLP's xIELU as one vector."""
        shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        one = np.arange(1)
        sources = [Source(f"{self.source}{stem}.{name}", shape, one, flat=True) for name, shape in shapes.items()]
        self.add("xielu", (len(sources),), sources)
