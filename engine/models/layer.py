"""Layer: one layer of the eager decoder, built from its parameters. Its MLP is gated, plain, or a mixture."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.backend import AttentionShape
from engine.models.activations import ACTIVATIONS, CLAMPED_SWIGLU, Activation, activation_of
from engine.models.blocks import BLOCKS, has_attention, has_mlp
from engine.models.encodings import LinearParameters, Parameters
from engine.models.expert_products import ChosenExperts, ExpertProducts
from engine.models.experts_config import ExpertsConfig
from engine.models.latent import LatentHeads, take_latent
from engine.models.linear import LinearLayer, Ops, Rows
from engine.models.model_config import ModelConfig
from engine.models.norms import HeadNorms, Norm, ProjectionNorms, take_head_norms, take_sub_norm
from engine.models.rank_group import Summed, SummingGroup
from engine.models.recurrent.mixer import Recur, RecurrentPart, take_recurrent
from engine.models.rope import Rotation, rotate
from engine.models.routing import Router
from engine.models.share import rank_share
from mesh.domain.kv import Span

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rotated queries, rotated keys and values, [num_tokens, heads, head_dim] -> [num_tokens, num_heads * head_dim]."""


class LinearLayers(Protocol):
    """Plug point of `take_layer`: makes the linear layers. Adapters, and those of engine/quantizer/layer.py."""

    def make_linear(self, name: str, parameters: LinearParameters, /) -> LinearLayer:
        """The layer of the parameter `name`."""
        ...

    def among(self, chosen: Tensor, /) -> AbstractContextManager[None]:
        """Meanwhile layers get only the chosen rows of the pass: [num_chosen] int64, ascending."""
        ...


class Mlp(Protocol):
    """Plug point of a layer: DenseMlp, Experts, SharedExpert, Summed."""

    @property
    def ops(self) -> Ops:
        """Operations that produce this MLP's input rows."""
        ...

    def __call__(self, x: Rows, /) -> Tensor:
        """Compute the MLP: [rows, hidden_size] -> the same shape."""
        ...

    def add_to(self, residual: Tensor, x: Rows, /) -> Tensor:
        """`residual` plus the MLP of x; may write into `residual`."""
        ...


class DenseMlp:
    """down(activation(gate) * up), or down(activation(up)) if not `gated`. Such an activation may itself be a gate."""

    def __init__(
        self, up: LinearLayer, down: LinearLayer, activation: Activation, *, gated: bool, norm: Norm | None = None
    ) -> None:
        """`norm`: of the input rows of `down`, in a gated MLP."""
        self.ops = up.ops
        self._norm = norm
        self._up = up
        self._down = down
        self._activation = activation
        self._bend = down.ops.gated if gated else down.ops.activated

    def __call__(self, x: Rows) -> Tensor:
        return self._down(self.inner(self._up(x)))

    def add_to(self, residual: Tensor, x: Rows) -> Tensor:
        return self._down.add_to(residual, self.inner(self._up(x)))

    def inner(self, up: Tensor) -> Rows:
        """The input rows of `down` from the results of `up`."""
        if self._norm is None:
            return self._bend(self._activation, up)
        gates, ups = up.chunk(2, -1)
        return self._down.ops.norm(self._activation(gates) * ups, self._norm)


class Experts:
    """A mixture of experts (Shazeer et al. 2017): each row is processed by those that the router chooses. The router is
    never quantised. `experts`: by number, all of them or those of this rank.

    On a GPU, `on_device` computes steps of few rows, and those that are captured. Otherwise the host reads once how
    many rows each expert has, and the experts run in order, each with all of its rows. torch's products of floats
    differ in their last bits with the number of rows: in int8 only those of the router. So a row's result may depend on
    its batch, unlike that of the compiled decoder, and near a tie even its experts may.
    """

    def __init__(
        self,
        config: ExpertsConfig,
        router: Router,
        experts: Mapping[int, DenseMlp],
        linears: LinearLayers,
        on_device: ChosenExperts | None = None,
    ) -> None:
        self.ops = next(iter(experts.values())).ops
        self._config = config
        self.router = router
        self._experts = experts
        self._linears = linears
        self._on_device = on_device

    def __call__(self, x: Rows, routed: Tensor | None = None) -> Tensor:
        """`routed`: the rows by which the router chooses, if they are others than x."""
        values = self.ops.values(x)
        chosen, shares = self.router(values if routed is None else routed)
        if self._on_device is not None and self._on_device.products.fit_step:
            return self._on_device(values, chosen, shares)
        return self._one_by_one(values, chosen.flatten(), shares.flatten())

    def add_to(self, residual: Tensor, x: Rows) -> Tensor:
        return residual + self(x)

    def _one_by_one(self, values: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """chosen, shares: [choices], `top_k` of each row."""
        total = torch.zeros_like(values)
        order = chosen.argsort(stable=True)  # by expert; rows of an expert ascend, as adapters need them
        rows, shares = order // self._config.top_k, shares[order, None]
        counts = torch.zeros(self._config.num_experts, dtype=torch.int64, device=chosen.device)
        end = 0
        for expert, count in enumerate(counts.index_add_(0, chosen, torch.ones_like(chosen)).tolist()):
            first, end = end, end + count
            if not count or expert not in self._experts:
                continue
            of_expert = rows[first:end]
            rows_of_expert, own_shares = values[of_expert], shares[first:end]
            if self._config.scales_inputs:
                rows_of_expert, own_shares = rows_of_expert * own_shares, torch.ones_like(own_shares)
            with self._linears.among(of_expert):
                result = self._experts[expert](self.ops.rows(rows_of_expert))
            total.index_add_(0, of_expert, result * own_shares)
        return total


class SharedExpert:
    """Experts plus a shared expert that processes every row; `gate` [1, hidden_size] weights its output per row."""

    def __init__(self, experts: Experts, shared: DenseMlp, gate: Tensor | None) -> None:
        self.ops = experts.ops
        self.experts = experts
        self._shared = shared
        self.gate = gate

    def __call__(self, x: Rows) -> Tensor:
        shared = self._shared(x)
        if self.gate is not None:
            shared = shared * F.linear(self.ops.values(x), self.gate).sigmoid()
        return self.experts(x) + shared

    def add_to(self, residual: Tensor, x: Rows) -> Tensor:
        return residual + self(x)


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention projections, MLP and norms of a layer; see engine.models.blocks.BLOCKS, whose key is `block`.

    A `recurrent` part stands in place of attention, whose projections are then None, or beside it. `post_norm` is
    applied before the MLP; it is the same object as `input_norm` if attention and MLP share one norm. In the block
    "post" `input_norm` is applied after attention, `post_norm` after the MLP; the block "behind" has neither.
    """

    block: str
    input_norm: Norm | None
    qkv: LinearLayer | None
    qk_norm: HeadNorms | ProjectionNorms | None
    norms_rotated: bool
    clip_qkv: float | None
    sinks: Tensor | None  # fp32 [num_heads], see AttentionShape
    latent: LatentHeads | None
    o: LinearLayer | None
    o_norm: Norm | None
    attn_out_norm: Norm | None
    post_norm: Norm | None
    mlp: Mlp | None
    mlp_out_norm: Norm | None
    mlp_beside: DenseMlp | None = None  # beside experts, see engine/models/per_layer.py
    gates_attention: bool = False
    recurrent: RecurrentPart | None = None

    @property
    def parallel(self) -> bool:
        return self.block.startswith("parallel")

    @property
    def like(self) -> Tensor:
        """A vector of the residual's width, dtype and device."""
        norm = self.input_norm or self.attn_out_norm
        assert norm is not None
        return norm.weight


def take_layer(
    parameters: Parameters,
    index: int,
    config: ModelConfig,
    ranks: SummingGroup | None,
    linears: LinearLayers,
    products: ExpertProducts | None = None,
) -> Layer:
    """Take the parameters of layer `index`, and build it. With `ranks`, each rank has the part of its share. With
    `products`, its experts can be computed on the device.
    """
    prefix, config = f"layers.{index}.", config.of_layer(index)
    norms = {name: take_norm(parameters, prefix + name, config) for name in BLOCKS[config.block]}
    qkv = o = qk_norm = o_norm = None
    mlp: Mlp | None = None
    summing, facts = ranks if ranks is not None and ranks.sums else None, config.experts
    sum_over_ranks = None if summing is None else summing.sum
    if has_attention(config, index):
        qkv, o = (_take_linear(parameters, prefix + name, linears) for name in ("qkv", "o"))
        num_ranks = 1 if ranks is None else ranks.degrees.tensor
        qk_norm = take_head_norms(parameters, prefix, config, num_ranks, sum_over_ranks)
        o_norm = take_sub_norm(parameters, f"{prefix}o_norm", config, sum_over_ranks)
    if facts is not None and facts.layers[index]:
        held = (rank_share(config) if ranks is None else rank_share(config, ranks.rank, ranks.degrees)).experts
        mlp = _take_mixture(parameters, prefix, config, held, linears, products)
    elif has_mlp(config, index):
        norm = take_sub_norm(parameters, f"{prefix}down_norm", config, sum_over_ranks)
        mlp = take_mlp(parameters, prefix, config, linears, norm)
    return Layer(
        block=config.block,
        input_norm=norms.get("input_norm"),
        qkv=qkv,
        qk_norm=qk_norm,
        norms_rotated=config.qk_norm_rotated,
        clip_qkv=config.clip_qkv,
        sinks=parameters.take(f"{prefix}sinks").float() if config.attention_sinks else None,
        latent=None if config.latent is None else take_latent(parameters, prefix, config, linears.make_linear),
        o=o if summing is None or o is None else Summed(o, summing),
        o_norm=o_norm,
        attn_out_norm=norms.get("attn_out_norm"),
        post_norm=norms.get("post_norm", norms.get("input_norm")),
        mlp=mlp if summing is None or mlp is None else Summed(mlp, summing),
        mlp_out_norm=norms.get("mlp_out_norm"),
        mlp_beside=take_mlp(parameters, prefix, config, linears) if config.per_layer is not None and facts else None,
        gates_attention=config.attention_gate,
        recurrent=take_recurrent(parameters, prefix, config, index, linears.make_linear),
    )


def take_norm(parameters: Parameters, name: str, config: ModelConfig) -> Norm:
    """Take a norm of the residual, of the kind that `config` selects."""
    centred = config.norm == "layer"
    return Norm(parameters.take(name), parameters.take_optional(f"{name}_bias"), config.norm_eps, centred)


def _take_linear(parameters: Parameters, name: str, linears: LinearLayers) -> LinearLayer:
    return linears.make_linear(name, parameters.take_linear(name))


def take_mlp(
    parameters: Parameters, prefix: str, config: ModelConfig, linears: LinearLayers, norm: Norm | None = None
) -> DenseMlp:
    activation = activation_of(config, parameters.take_optional(f"{prefix}xielu"))
    return _make_mlp(_take_matrices(parameters, prefix, config), config, linears, activation, norm)


def _take_matrices(parameters: Parameters, prefix: str, config: ModelConfig) -> dict[str, LinearParameters]:
    """The two matrices of an MLP, by their names."""
    names = (prefix + ("gate_up" if config.gated else "up"), f"{prefix}down")
    return {name: parameters.take_linear(name) for name in names}


def _make_mlp(
    matrices: Mapping[str, LinearParameters],
    config: ModelConfig,
    linears: LinearLayers,
    activation: Activation,
    norm: Norm | None = None,
) -> DenseMlp:
    up, down = (linears.make_linear(name, matrix) for name, matrix in matrices.items())
    gated = config.gated and config.activation != CLAMPED_SWIGLU
    return DenseMlp(up, down, activation, gated=gated, norm=norm)


def _take_mixture(
    parameters: Parameters,
    prefix: str,
    config: ModelConfig,
    held: Span,
    linears: LinearLayers,
    products: ExpertProducts | None,
) -> Mlp:
    facts = config.experts
    assert facts is not None
    more = (parameters.take_optional(f"{prefix}{kind}") for kind in ("choice_bias", "router_bias", "expert_factors"))
    router = Router(facts, parameters.take(f"{prefix}router"), *more)
    mlps: dict[int, DenseMlp] = {}
    matrices: list[LinearParameters] = []  # kept for the products only: layers may store them in another form
    for number in range(held.first, held.end):
        taken = _take_matrices(parameters, f"{prefix}experts.{number}.", config)
        mlps[number] = _make_mlp(taken, config, linears, ACTIVATIONS[config.activation])
        if products is not None:
            matrices += taken.values()
    on_device = None
    if products is not None:
        on_device = ChosenExperts(products, held, matrices[::2], matrices[1::2], mlps[held.first].inner)
        on_device.compile(facts.top_k)
    experts = Experts(facts, router, mlps, linears, on_device)
    if not facts.shared_size:
        return experts
    shared = take_mlp(parameters, f"{prefix}shared.", config, linears)
    return SharedExpert(experts, shared, parameters.take_optional(f"{prefix}shared_gate"))


def run_layer(
    layer: Layer,
    heads: AttentionShape,
    residual: Tensor,
    rotation: Rotation | None,
    attend: Attend,
    recur: Recur | None = None,
) -> Tensor:
    """The residual [num_tokens, hidden_size] after the layer, which may write into the one before. `rotation`: of the
    tokens; `attend` and `recur` see the tokens' context.
    """
    recurrent, mlp, recurred = layer.recurrent, layer.mlp, None
    if recurrent is not None and recur is not None:
        recurred = recurrent.mix(_rows(recurrent.into, residual, layer.input_norm), recur)
    if layer.qkv is not None and layer.o is not None:
        is_post = layer.block == "post"
        x = _rows(layer.qkv, residual, None if is_post else layer.input_norm)
        mixed = _rows(layer.o, _mix(layer.qkv(x), layer, heads, rotation, attend), layer.o_norm)
        if layer.parallel and mlp is not None:
            shares_norm = layer.post_norm is layer.input_norm and layer.qkv.ops is mlp.ops
            beside = x if shares_norm else _rows(mlp, residual, layer.post_norm)
            return mlp.add_to(layer.o.add_to(residual, mixed), beside)
        if is_post and mlp is not None:
            assert layer.input_norm is not None
            assert layer.post_norm is not None
            residual = layer.input_norm(layer.o.add_to(residual, mixed))
            return layer.post_norm(mlp.add_to(residual, mlp.ops.rows(residual)))
        residual = _add(residual, layer.o, mixed, layer.attn_out_norm)
    if recurrent is not None and recurred is not None:
        residual = _add(residual, recurrent.out, recurred, layer.attn_out_norm)
    return residual if mlp is None else _add(residual, mlp, _rows(mlp, residual, layer.post_norm), layer.mlp_out_norm)


def _rows(part: LinearLayer | Mlp, x: Tensor, norm: Norm | None) -> Rows:
    """The input rows of a part."""
    return part.ops.rows(x) if norm is None else part.ops.norm(x, norm)


def _mix(projected: Tensor, layer: Layer, shape: AttentionShape, rotation: Rotation | None, attend: Attend) -> Tensor:
    """The result of attention, which `o` projects."""
    gate = None
    if layer.gates_attention:
        width = shape.num_heads * shape.head_dim
        queries, gate, rest = torch.split(projected, [width, width, projected.shape[1] - 2 * width], 1)
        projected = torch.cat((queries, rest), 1)
    mixed = attend(*_project(projected, layer, shape, rotation))
    if layer.latent is not None:
        return layer.latent.results(mixed, shape)
    return mixed if gate is None else mixed * gate.sigmoid()


def _project(
    qkv: Tensor, layer: Layer, shape: AttentionShape, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [num_tokens, num_heads, head_dim], rotated keys and values [.., num_kv_heads, ..]."""
    if layer.latent is not None and rotation is not None:
        return layer.latent.project(qkv, shape, rotation)
    num_scored = shape.num_heads + shape.num_kv_heads
    if layer.clip_qkv is not None:
        qkv = qkv.clamp(-layer.clip_qkv, layer.clip_qkv)
    heads = qkv.view(qkv.shape[0], num_scored + shape.num_kv_heads, shape.head_dim)
    scored, values = heads[:, :num_scored], heads[:, num_scored:]
    if layer.qk_norm is not None and not layer.norms_rotated:
        scored = layer.qk_norm(scored[:, : shape.num_heads], scored[:, shape.num_heads :])
    if rotation is not None:
        scored = rotate(scored, rotation.cos, rotation.sin)
    if layer.qk_norm is not None and layer.norms_rotated:
        scored = layer.qk_norm(scored[:, : shape.num_heads], scored[:, shape.num_heads :])
    queries, keys = scored[:, : shape.num_heads], scored[:, shape.num_heads :]
    if rotation is not None and rotation.query_factors is not None:
        queries = queries * rotation.query_factors
    return queries, keys, values


def _add(residual: Tensor, part: LinearLayer | Mlp, rows: Rows, out_norm: Norm | None) -> Tensor:
    if out_norm is None:
        return part.add_to(residual, rows)
    return residual + out_norm(part(rows))
