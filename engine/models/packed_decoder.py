"""The weights of a CompiledDecoder as its loop reads them, packed from parameters."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import attention_shape
from engine.kernels.cpu.arguments import Array, Floats, Weights
from engine.kernels.cpu.machine import EIGHT_BITS, IN_BF16, IN_FP32, MXFP4, NF4, PANEL, WITH_MINIMA
from engine.kernels.cpu.products.packing import MatrixShape, Packer, as_array, unit_runs
from engine.kernels.cpu.recurrent.recurrent_arguments import RecurrentWeights
from engine.loading.load_phases import load_phase
from engine.models.activations import xielu_parameters
from engine.models.blocks import BLOCKS, has_attention, has_mlp
from engine.models.encodings import IN_STEPS, OUTPUT, PACKED, Forms, LinearParameters, Parameters
from engine.models.experts_config import NO_EXPERTS
from engine.models.latent_config import NO_LATENT
from engine.models.model_config import ModelConfig
from engine.models.packed_per_layer import (
    LAYER_INPUT,
    PER_LAYER_NORMS,
    PROJECTION,
    input_shapes,
    take_layer_inputs,
    take_norms,
    take_scalars,
    take_sized_head_norms,
)
from engine.models.packed_weights import PackedDecoder, qkv_width
from engine.models.recurrent.for_kernels import stacked
from engine.models.recurrent.kinds import take_recurrence
from engine.models.share import RankShare

_NORMS = ("input_norm", "post_norm", "attn_out_norm", "mlp_out_norm", *PER_LAYER_NORMS)
"""In the order of the kernels' numbers; see engine/kernels/cpu/arguments.py."""
_PACKED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8, IN_STEPS: torch.int64}
_EXACT_LATENT_OUTPUTS = (torch.float8_e4m3fn, torch.float32)
"""Types of the output matrix with which the panels of latent attention are in fp32."""


class Tables(NamedTuple):
    """The embedding and the output matrix, as CompiledDecoder has them; `dtype`: of layers in floating point that are
    packed beside them.
    """

    embed: Tensor
    output: Weights
    dtype: torch.dtype


def pack_decoder(
    config: ModelConfig, parameters: Parameters, share: RankShare, tables: Tables | None = None
) -> PackedDecoder:
    """Take `parameters` one by one, but not those in `tables`, and pack them. Raises ValueError if not in PACKED."""
    if parameters.encoding not in PACKED:
        raise ValueError(f"the compiled decoder cannot pack encoding {parameters.encoding!r}")
    embed = parameters.take("embed") if tables is None else tables.embed
    dtype = embed.dtype if tables is None else tables.dtype
    packer = Packer(_matrix_shapes(config, share, parameters), _PACKED_DTYPES.get(parameters.encoding, dtype))
    # First, as copies of a tied embedding would lie beside all layers later.
    output = tables.output if tables else _pack_output(parameters, embed, config, share)
    positions = _take_positions(parameters, config, share)
    numbers = range(share.layers.first, share.layers.end)
    norms, head_norms, activation, sinks, recurrences = [], [], [], [], []
    routers, packed = _empty_routers(config, len(numbers)), 0
    latents = _empty_latents(config, len(numbers), is_exact=_output_dtype(parameters, dtype) in _EXACT_LATENT_OUTPUTS)
    for i, number in enumerate(numbers):
        layer, packed = f"layers.{number}", _pack_layer(packer, packed, parameters, config, number)
        if has_experts(config, number):
            _take_router(parameters, layer, i, routers)
        if config.recurrent is not None and config.is_recurrent(number):
            taken = take_recurrence(parameters, f"{layer}.", config.recurrent, config.norm_eps)
            recurrences.append(taken.for_kernels())
        if config.latent is not None:
            _take_latent(parameters, layer, latents, i)
        norms.append(_layer_norms(parameters, layer, config))
        head_norms.append(_head_norms(parameters, number, config))
        activation.append(_take_activation(parameters, layer))
        if config.attention_sinks:
            sinks.append(parameters.take(f"{layer}.sinks").float().numpy())
    layer_inputs, inputs_norm = _pack_layer_inputs(packer, packed, parameters, config)
    return PackedDecoder(
        embed=as_array(embed if share.rank == 0 else embed[:0]),
        positions=positions,
        embed_norm=_take_norm(parameters, "embed_norm", config) if config.embed_norm else positions[:0],
        weights=packer.weights,
        output=output,
        norms=np.stack(norms),
        final_norm=_take_norm(parameters, "final_norm", config),
        sub_norms=_take_sub_norms(parameters, config, numbers),
        head_norms=np.stack(head_norms),
        scalars=take_scalars(parameters, config, numbers),
        layer_inputs=layer_inputs,
        layer_inputs_norm=inputs_norm,
        activation=torch.stack(activation).numpy(),
        sinks=np.array(sinks, np.float32).reshape(len(sinks), -1 if sinks else 0),
        **routers._asdict(),
        **latents._asdict(),
        **_recurrent_fields(stacked(recurrences)),
    )


def _recurrent_fields(weights: RecurrentWeights) -> Mapping[str, Floats]:
    """The fields of PackedDecoder with the parameters of recurrent layers."""
    fields = weights._asdict()
    return {"conv_biases": fields.pop("biases"), "recurrent_norms": fields.pop("norms"), **fields}


def _output_dtype(parameters: Parameters, dtype: torch.dtype) -> torch.dtype:
    return {"fp8": torch.float8_e4m3fn, "float": dtype}.get(parameters.encoding, torch.int8)


def _pack_output(parameters: Parameters, embed: Tensor, config: ModelConfig, share: RankShare) -> Weights:
    """Pack the output matrix. Of a tied embedding rank 0 holds all rows, other ranks their own."""
    output = parameters.take_output(embed[: share.vocab.count])
    dtype = output.weight.dtype if parameters.stored.keeps_output else _output_dtype(parameters, embed.dtype)
    packer = Packer([_output_shape(config, share, parameters, embed)], dtype)
    _pack(packer, 0, output)
    return packer.weights


def _pack_layer(packer: Packer, number: int, parameters: Parameters, config: ModelConfig, layer: int) -> int:
    """Pack the matrices of a layer, from this number on; returns the number of the next layer's first."""
    for name in matrix_names(config, layer):
        matrix = parameters.take_linear(f"layers.{layer}.{name}")
        _pack(packer, number, _with_gates_last(matrix, config) if name == "qkv" else matrix)
        number += 1
    return number


def _take_activation(parameters: Parameters, layer: str) -> Tensor:
    xielu = parameters.take_optional(f"{layer}.xielu")
    return torch.empty(0) if xielu is None else xielu_parameters(xielu)


def _pack_layer_inputs(
    packer: Packer, number: int, parameters: Parameters, config: ModelConfig
) -> tuple[Array, Floats]:
    """Take what layers add for the token itself, and pack its projection, the last matrix, if there is any."""
    table, norm = take_layer_inputs(parameters, config)
    if table.size:
        _pack(packer, number, parameters.take_linear(PROJECTION))
    return table, norm


def has_experts(config: ModelConfig, layer: int) -> bool:
    """True if the layer has experts."""
    return config.experts is not None and config.experts.layers[layer]


def matrix_names(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Names of a layer's matrices, in the order of the kernels' numbers."""
    per_layer = config.per_layer
    names = list(LAYER_INPUT) if per_layer is not None and per_layer.input_width else []
    names += ["recurrent_in", "recurrent_out"] if config.is_recurrent(layer) else []
    if has_attention(config, layer):
        names += ["q_b", "qkv", "o"] if config.latent is not None and config.latent.query_rank else ["qkv", "o"]
    if not has_mlp(config, layer):
        return tuple(names)
    parts = [""] if per_layer is not None or not has_experts(config, layer) else []
    if (experts := config.experts) is not None and has_experts(config, layer):
        parts += [f"experts.{number}." for number in range(experts.num_experts)]
        parts += ["shared."] if experts.shared_size else []
    up = "gate_up" if config.gated else "up"
    return *names, *(part + name for part in parts for name in (up, "down"))


class _Routers(NamedTuple):
    """As in PackedDecoder."""

    routers: Floats
    router_biases: Floats
    choice_biases: Floats
    shared_gates: Floats
    expert_factors: Floats


def _empty_routers(config: ModelConfig, num_layers: int) -> _Routers:
    experts, hidden = config.experts or NO_EXPERTS, config.hidden_size
    num_panels = -(-experts.num_experts // PANEL)
    return _Routers(
        routers=np.zeros((num_layers, num_panels, hidden, PANEL), np.float32),
        router_biases=np.zeros((num_layers, experts.num_experts if experts.router_bias else 0), np.float32),
        choice_biases=np.zeros((num_layers, experts.num_experts if experts.choice_bias else 0), np.float32),
        shared_gates=np.zeros((num_layers, int(experts.shared_gate), hidden), np.float32),
        expert_factors=np.zeros((num_layers, experts.num_experts if config.per_layer is not None else 0), np.float32),
    )


def _take_router(parameters: Parameters, layer: str, number: int, routers: _Routers) -> None:
    """Pack the router of layer `number` of the rank, whose parameters begin with `layer`."""
    routers.routers[number] = _in_panels(parameters.take(f"{layer}.router").float())
    for kind, taken in zip(("router_bias", "choice_bias", "shared_gate", "expert_factors"), routers[1:], strict=True):
        if taken.shape[1]:
            taken[number] = parameters.take(f"{layer}.{kind}").float()


class _Latents(NamedTuple):
    """As in PackedDecoder."""

    q_norms: Floats
    kv_norms: Floats
    key_up: Array
    value_up: Array


def _empty_latents(config: ModelConfig, num_layers: int, *, is_exact: bool) -> _Latents:
    """The panels, which project to and from the latent, are in fp16 unless `is_exact`."""
    facts, heads = config.latent or NO_LATENT, config.num_heads if config.latent else 0
    dtype = np.float32 if is_exact else np.uint16
    return _Latents(
        q_norms=np.empty((num_layers, 1, facts.query_rank), np.float32),
        kv_norms=np.empty((num_layers, 1, facts.kv_rank), np.float32),
        key_up=np.empty((num_layers, heads, facts.kv_rank // PANEL, facts.plain_dim, PANEL), dtype),
        value_up=np.empty((num_layers, heads, facts.value_dim // PANEL, facts.kv_rank, PANEL), dtype),
    )


def _take_latent(parameters: Parameters, layer: str, latents: _Latents, index: int) -> None:
    q_norms, kv_norms, key_up, value_up = latents
    if q_norms.shape[2]:
        q_norms[index, 0] = parameters.take(f"{layer}.q_norm").float()
    kv_norms[index, 0] = parameters.take(f"{layer}.kv_norm").float()
    heads, panels, plain, _ = key_up[index].shape
    to_latent = parameters.take(f"{layer}.key_up").float().numpy().reshape(heads, plain, panels, PANEL)
    heads, panels, rank, _ = value_up[index].shape
    from_latent = parameters.take(f"{layer}.value_up").float().numpy().reshape(heads, panels, PANEL, rank)
    for packed, matrix in ((key_up, to_latent.transpose(0, 2, 1, 3)), (value_up, from_latent.transpose(0, 1, 3, 2))):
        packed[index] = matrix if packed.dtype == np.float32 else matrix.astype(np.float16).view(np.uint16)


def _in_panels(router: Tensor) -> Tensor:
    """[experts, hidden] -> [panels, hidden, 16]."""
    padded = torch.nn.functional.pad(router, (0, 0, 0, -len(router) % PANEL))
    return padded.view(-1, PANEL, router.shape[1]).transpose(1, 2)


def _take_norm(parameters: Parameters, name: str, config: ModelConfig) -> Floats:
    """Weights of a norm, [1, hidden]; those of a layer norm and its biases, [2, hidden]."""
    weight, bias = parameters.take(name), parameters.take_optional(f"{name}_bias")
    rows = [weight] if config.norm == "rms" else [weight, torch.zeros_like(weight) if bias is None else bias]
    taken: Floats = torch.stack(rows).float().numpy()
    return taken


def _layer_norms(parameters: Parameters, layer: str, config: ModelConfig) -> Floats:
    taken = {name: _take_norm(parameters, f"{layer}.{name}", config) for name in BLOCKS[config.block]}
    taken.setdefault("input_norm", next(iter(taken.values())))  # not read if the block has no such norm
    taken.setdefault("post_norm", taken["input_norm"])
    if config.per_layer is not None:
        taken = dict.fromkeys(PER_LAYER_NORMS, taken["input_norm"]) | taken | take_norms(parameters, layer, config)
    return np.stack([taken[name] for name in _NORMS if name in taken])


def _take_sub_norms(parameters: Parameters, config: ModelConfig, layers: range) -> Floats:
    widths = (config.num_heads * config.head_dim, config.intermediate_size) if config.sub_norms else ()
    norms = np.zeros((len(layers), len(widths), 1, max(widths, default=0)), np.float32)
    for number, layer in enumerate(layers if widths else ()):
        for norm, name, width in zip(norms[number], ("o_norm", "down_norm"), widths, strict=True):
            norm[0, :width] = parameters.take(f"layers.{layer}.{name}").float()
    return norms


def has_head_norms(config: ModelConfig, layer: int) -> bool:
    """True if heads of the layer are normed."""
    return config.per_layer is not None or (config.of_layer(layer).qk_norm and has_attention(config, layer))


def _head_norms(parameters: Parameters, layer: int, config: ModelConfig) -> Floats:
    if config.per_layer is not None:
        return take_sized_head_norms(parameters, layer, config)
    if not config.qk_norm:
        return np.empty((0, config.head_dim), np.float32)
    if not has_head_norms(config, layer):
        return np.zeros((2, config.head_dim), np.float32)  # not read
    names = (f"layers.{layer}.q_norm", f"layers.{layer}.k_norm")
    taken = [parameters.take(name).float().view(-1, config.head_dim) for name in names]
    weights: Floats = torch.cat(taken).numpy()
    return weights


def _take_positions(parameters: Parameters, config: ModelConfig, share: RankShare) -> Floats:
    """Return what rank 0 adds to embedded tokens, [0, hidden] if there is nothing to add."""
    taken = parameters.take_optional("positions")
    if taken is None or share.rank > 0:
        return np.empty((0, config.hidden_size), np.float32)
    rows: Floats = taken.float().numpy()
    return rows


def _with_gates_last(matrix: LinearParameters, config: ModelConfig) -> LinearParameters:
    """The matrix with the gates of attention, if any, after the values instead of after the queries."""
    if not config.attention_gate:
        return matrix
    names = ("weight", "scales", "zeros", "steps", "lows", "minima", "bias", "numbers")
    given = {name: getattr(matrix, name) for name in names}
    moved: dict[str, Any] = {name: _gates_last(values, config) for name, values in given.items() if values is not None}
    return replace(matrix, **moved)


def _gates_last(values: Tensor, config: ModelConfig) -> Tensor:
    """Rows of queries, gates, keys and values as rows of queries, keys, values and gates."""
    width = config.num_heads * config.head_dim
    return torch.cat((values[:width], values[2 * width :], values[width : 2 * width]))


def _matrix_shapes(config: ModelConfig, share: RankShare, parameters: Parameters) -> list[MatrixShape]:
    stored = parameters.stored
    group = stored.group if parameters.encoding == "int4" else 0

    def mlp(own_width: int, width: int) -> list[MatrixShape]:
        outputs = (1 + config.gated) * own_width
        return [
            MatrixShape(outputs, config.hidden_size, gated=config.gated, group=group),
            MatrixShape(share.hidden.count, width, group=group),
        ]

    experts, routed = config.experts, []
    if experts is not None:
        routed = mlp(experts.intermediate_size, experts.intermediate_size) * experts.num_experts
        routed += mlp(experts.shared_size, experts.shared_size) if experts.shared_size else []
    (of_layer, of_model), shapes, names = input_shapes(config, group), [], []
    for layer in range(share.layers.first, share.layers.end):
        names += [f"layers.{layer}.{name}" for name in matrix_names(config, layer)]
        shapes += of_layer + _mixing_shapes(config, share, layer, group)
        if not has_mlp(config, layer):
            continue
        own = config.of_layer(layer).intermediate_size
        dense = mlp(share.inner.count if config.per_layer is None else own, own)
        if config.per_layer is not None or not has_experts(config, layer):
            shapes += dense
        shapes += routed if has_experts(config, layer) else []
    names += [PROJECTION] * len(of_model)
    named = dict(zip(names, shapes + of_model, strict=True))
    if parameters.encoding == "fp8":
        return [_in_forms(shape, stored.forms[name], name, config) for name, shape in named.items()]
    kinds = dict.fromkeys(stored.in_int8, EIGHT_BITS) | dict.fromkeys(stored.with_minima, WITH_MINIMA)
    return [replace(shape, numbers=kinds.get(name, shape.numbers)) for name, shape in named.items()]


def _in_forms(shape: MatrixShape, forms: Forms, name: str, config: ModelConfig) -> MatrixShape:
    """The shape of a matrix of a model in fp8, whose outputs have these forms."""
    counts, of_outputs = torch.tensor(forms).T
    rows = of_outputs.repeat_interleave(counts)
    rows = _gates_last(rows, config) if config.attention_gate and name.endswith(".qkv") else rows
    return replace(shape, runs=unit_runs(shape.columns, rows, gated=shape.gated))


def _output_shape(config: ModelConfig, share: RankShare, parameters: Parameters, embed: Tensor) -> MatrixShape:
    shape = MatrixShape(share.vocab.count, config.hidden_size)
    if parameters.encoding != "fp8" or not shape.columns:
        return shape
    tied = ((shape.columns, IN_BF16 if embed.dtype is torch.bfloat16 else IN_FP32),)
    return _in_forms(shape, parameters.stored.forms.get(OUTPUT, tied), OUTPUT, config)


def _mixing_shapes(config: ModelConfig, share: RankShare, layer: int, group: int) -> list[MatrixShape]:
    """Shapes of a layer's recurrence and attention; it has one of them or both."""
    shapes = []
    if config.is_recurrent(layer) and (facts := config.recurrent) is not None:
        shapes.append(MatrixShape(facts.projected, config.hidden_size, group=group))
        shapes.append(MatrixShape(config.hidden_size, facts.result_width, group=group))
    if not has_attention(config, layer):
        return shapes
    own = config.of_layer(layer)
    output = MatrixShape(share.hidden.count, own.num_heads * own.result_dim, group=group)
    if (latent := config.latent) is None:
        heads = attention_shape(own) if config.per_layer is not None else attention_shape(own).shard(share.heads)
        qkv = qkv_width(heads, own) if config.stores_kv(layer) else heads.num_heads * heads.head_dim
        return [*shapes, MatrixShape(qkv, config.hidden_size, group=group), output]
    q_width = config.num_heads * (config.rope.dim + latent.plain_dim)
    first = MatrixShape((latent.query_rank or q_width) + config.head_dim, config.hidden_size, group=group)
    if latent.query_rank:
        shapes.append(MatrixShape(q_width, latent.query_rank, group=group))
    return [*shapes, first, output]


def _pack(packer: Packer, index: int, matrix: LinearParameters) -> None:
    with load_phase("pack"):
        if packer.dtype is torch.float8_e4m3fn:
            is_float = matrix.encoding == "float"
            numbers, octets = (matrix.weight, None) if is_float else (matrix.numbers, matrix.weight)
            packer.put_forms(index, numbers, octets, matrix.scales, matrix.bias)
        elif matrix.scales is not None and matrix.steps is not None and matrix.lows is not None:
            packer.put_steps(index, matrix.weight, matrix.scales, matrix.steps, matrix.lows, matrix.bias)
        elif matrix.scales is None or (taken := matrix.zeros if matrix.minima is None else matrix.minima) is None:
            packer.put(index, matrix.weight, scales=matrix.scales, bias=matrix.bias)
        else:
            levels = MXFP4 if matrix.is_mxfp4 else NF4 if matrix.is_nf4 else None
            packer.put_groups(index, matrix.weight, matrix.scales, taken, matrix.bias, levels=levels)
        if matrix.order is not None:
            packer.put_order(index, matrix.order)
        packer.multiply(index, matrix.factor)
