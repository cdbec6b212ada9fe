"""The constants of a model for the compiled loop: its packed weights, and the facts of its family."""

from collections.abc import Sequence

import numpy as np

from engine.attention.backend import attention_shape
from engine.attention.cpu import head_shape, kernel_slopes
from engine.attention.views import View, parts_of, view_of_layer
from engine.kernels.cpu.arguments import (
    NO_WINDOW,
    HeadShape,
    Int64s,
    Routing,
    Window,
)
from engine.kernels.cpu.attention.batch import cache_code
from engine.kernels.cpu.attention.latent import Latent
from engine.kernels.cpu.experts import Experts
from engine.kernels.cpu.layer_inputs import LayerInputs
from engine.kernels.cpu.machine import LOG2_E
from engine.kernels.cpu.products.panels import panel_product
from engine.kernels.cpu.recurrent.recurrence import mix_address, multiply_address
from engine.kernels.cpu.recurrent.recurrent_arguments import NO_RECURRENCE, Recurrent, RecurrentWeights, StatePlaces
from engine.kernels.cpu.step_arguments import NUM_LAYER_KERNELS, Family, ModelConstants
from engine.kv.cache import KVCache
from engine.models.blocks import BLOCKS, has_attention, has_mlp
from engine.models.cpu_support import KERNEL_ACTIVATIONS, KERNEL_SCORINGS
from engine.models.experts_config import NO_EXPERTS
from engine.models.latent_config import LATENT_EPS, NO_LATENT
from engine.models.model_config import ModelConfig
from engine.models.packed_decoder import has_experts, has_head_norms, matrix_names
from engine.models.packed_weights import PackedDecoder
from engine.models.recurrent.for_kernels import KINDS, recurrent_layers
from engine.models.rope import rope_of_layer


def model_constants(
    config: ModelConfig,
    packed: PackedDecoder,
    layers: Sequence[int],
    shapes: Sequence[HeadShape],
    cache: KVCache,
    places: StatePlaces | None,
) -> ModelConstants:
    """The constants of these layers, with heads of these shapes, KV in this cache and states in these places."""
    windows = cache.layout.windows
    views, parts = [view_of_layer(config, layer, windows) for layer in layers], parts_of_blocks(config, windows)
    heads = [(each.num_kv_heads, each.head_dim, each.row_bytes, each.num_slots) for each in shapes]
    num_before = [0 if config.recurrent is None else config.recurrent.num_before(layer) for layer in layers]
    return ModelConstants(
        weights=packed.weights,
        firsts=_first_matrices(config, layers),
        numbers=np.array([view.layer for view in views], np.int64) - min(view.layer for view in views),
        groups=np.array([parts.index(_part_of(view)) if parts else view.group for view in views], np.int64),
        own_kv=np.array([config.stores_kv(layer) for layer in layers], np.int64),
        heads=np.array(heads, np.int64),
        widths=np.array([_widths(config.of_layer(layer)) for layer in layers], np.int64),
        state_numbers=np.array(num_before, np.int64),
        have_attention=np.array([has_attention(config, layer) for layer in layers], np.int64),
        are_recurrent=np.array([config.is_recurrent(layer) for layer in layers], np.int64),
        have_mlp=np.array([has_mlp(config, layer) for layer in layers], np.int64),
        output=packed.output,
        norms=packed.norms,
        final_norm=packed.final_norm,
        sub_norms=packed.sub_norms,
        head_norms=packed.head_norms,
        scalars=packed.scalars,
        activation=packed.activation,
        num_head_norms=_num_head_norms(config, layers, packed),
        windows=np.array([_window(config, layer) for layer in layers], np.int64),
        ropes=np.array([rope_of_layer(config, layer) for layer in layers], np.int64),
        eps=np.float32(config.norm_eps),
        shape=max(shapes, key=lambda shape: shape.head_dim),
        family=_family(config),
        experts=_experts(config, packed, layers),
        latent=_latent(config, packed),
        inputs=_inputs(config, packed),
        recurrent=_recurrent(config, packed, places),
        slopes=kernel_slopes(attention_shape(config).shard(cache.span.heads)),
        sinks=packed.sinks * np.float32(LOG2_E),
        cache=cache.elements,
        cache_code=cache_code(cache.elements.dtype),
        mix_at=mix_address() if config.recurrent is not None else 0,
        layer_code=np.zeros(NUM_LAYER_KERNELS, np.int64),
    )


def head_shapes(config: ModelConfig, cache: KVCache, layers: Sequence[int]) -> list[HeadShape]:
    """The heads of each of these layers whose KV this cache has."""
    if config.per_layer is None:
        heads = attention_shape(config).shard(cache.span.heads)
        return [head_shape(heads, cache.layer(cache.span.layers.first))] * len(layers)
    shapes = []
    for layer in layers:
        view, heads = view_of_layer(config, layer, cache.layout.windows), attention_shape(config.of_layer(layer))
        shapes.append(head_shape(heads, parts_of(cache.layer(view.layer), view.num_parts, heads)))
    return shapes


def parts_of_blocks(config: ModelConfig, windows: Sequence[int]) -> list[tuple[int, int, int]]:
    """The parts of blocks in which layers have their KV: (group, number, parts of a block); nothing if all have whole
    blocks.
    """
    if config.per_layer is None:
        return []
    return sorted({_part_of(view_of_layer(config, layer, windows)) for layer in range(config.num_layers)})


def _part_of(view: View) -> tuple[int, int, int]:
    return view.group, view.part, view.num_parts


def _recurrent(config: ModelConfig, packed: PackedDecoder, places: StatePlaces | None) -> Recurrent:
    if config.recurrent is None or places is None:
        return NO_RECURRENCE
    taken = (packed.taps, packed.conv_biases, packed.rates, packed.rate_biases, packed.skips)
    weights = RecurrentWeights(*taken, packed.recurrent_norms, packed.value_panels, packed.step_panels)
    return recurrent_layers(
        weights, config.recurrent, config.norm_eps, places, multiply_address(KINDS[config.recurrent.kind])
    )


def _widths(config: ModelConfig) -> tuple[int, int]:
    return config.num_heads * config.result_dim, config.intermediate_size


def _inputs(config: ModelConfig, packed: PackedDecoder) -> LayerInputs:
    """The projection is not scaled by hidden_size ** -0.5, so the norm's epsilon is."""
    width = 0 if config.per_layer is None else config.per_layer.input_width
    return LayerInputs(width, packed.layer_inputs_norm, np.float32(config.norm_eps * config.hidden_size))


def _num_head_norms(config: ModelConfig, layers: Sequence[int], packed: PackedDecoder) -> Int64s:
    counts = [packed.head_norms.shape[1] * has_head_norms(config, layer) for layer in layers]
    return np.array(counts, np.int64)


def _window(config: ModelConfig, layer: int) -> Window:
    window = config.windows[layer]
    if window is None:
        return Window(NO_WINDOW)
    return Window(1, window) if config.windows_are_chunks else Window(window)


def _family(config: ModelConfig) -> Family:
    return Family(
        parallel=config.block.startswith("parallel"),
        norms_inputs="input_norm" in BLOCKS[config.block],
        sandwich="attn_out_norm" in BLOCKS[config.block],
        gated=config.gated,
        activation=KERNEL_ACTIVATIONS[config.activation],
        gate_factor=np.float32(config.activation_factors[0]),
        inner_factor=np.float32(config.activation_factors[1]),
        centred_heads=config.norm == "layer",
        norms_rotated=config.qk_norm_rotated,
        norms_values=config.per_layer is not None,
        clip_qkv=np.float32(config.clip_qkv or 0.0),
        gates_attention=config.attention_gate,
    )


def _first_matrices(config: ModelConfig, layers: Sequence[int]) -> Int64s:
    """The number of each layer's `qkv`, of the first matrix of its recurrence, and of the first one after both. Numbers
    of parts that a layer does not have are not read.
    """
    firsts, number = [], 0
    for layer in layers:
        names = matrix_names(config, layer)
        places = [names.index(name) if name in names else 0 for name in ("qkv", "recurrent_in")]
        after = max((place + 1 for place, name in enumerate(names) if name in ("o", "recurrent_out")), default=0)
        firsts.append([number + place for place in (*places, after)])
        number += len(names)
    return np.array(firsts, np.int64)


def _latent(config: ModelConfig, packed: PackedDecoder) -> Latent:
    facts = config.latent or NO_LATENT
    return Latent(
        packed.q_norms,
        packed.kv_norms,
        packed.key_up,
        packed.value_up,
        query_rank=facts.query_rank,
        rank=facts.kv_rank,
        rotated=config.rope.dim,
        plain=facts.plain_dim,
        width=facts.value_dim,
        eps=np.float32(LATENT_EPS),
        multiply=panel_product.address_for(packed.key_up.dtype) if config.latent else 0,
    )


def _experts(config: ModelConfig, packed: PackedDecoder, layers: Sequence[int]) -> Experts:
    facts = config.experts or NO_EXPERTS
    return Experts(
        layers=np.array([has_experts(config, layer) for layer in layers], np.int64),
        routing=Routing(
            routers=packed.routers,
            router_biases=packed.router_biases,
            choice_biases=packed.choice_biases,
            shared_gates=packed.shared_gates,
            expert_factors=packed.expert_factors,
            num_experts=facts.num_experts,
            top_k=facts.top_k,
            normalised=facts.normalised,
            scoring=KERNEL_SCORINGS[facts.scoring],
            num_groups=facts.num_groups,
            top_groups=facts.top_groups,
            group_best=facts.group_best,
            biases_outputs=facts.biases_outputs,
            routed_scale=np.float32(facts.routed_scale),
            mixer_range=np.float32(facts.mixer_range),
            share_floor=np.float32(facts.share_floor),
        ),
        num_experts=facts.num_experts,
        width=facts.intermediate_size,
        shared_width=facts.shared_size,
        gated=config.gated,
        activation=KERNEL_ACTIVATIONS[config.activation],
        scales_inputs=facts.scales_inputs,
        are_beside=config.per_layer is not None and config.experts is not None,
    )
