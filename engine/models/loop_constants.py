"""The constants of a model for the compiled loop: its packed weights, and the facts of its family."""

from collections.abc import Sequence

import numpy as np

from engine.kernels.cpu.arguments import (
    NO_WINDOW,
    HeadShape,
    Int64s,
    RecurrentWeights,
    Routing,
    StatePlaces,
    Window,
)
from engine.kernels.cpu.experts import Experts
from engine.kernels.cpu.latent import Latent
from engine.kernels.cpu.recurrence import mix_address
from engine.kernels.cpu.step_arguments import Kind, ModelConstants
from engine.models.blocks import BLOCKS
from engine.models.cpu_support import KERNEL_ACTIVATIONS, KERNEL_SCORINGS
from engine.models.experts_config import NO_EXPERTS
from engine.models.latent_config import LATENT_EPS, NO_LATENT
from engine.models.model_config import ModelConfig
from engine.models.packed_decoder import PackedDecoder, has_experts, matrix_names
from engine.models.recurrent.for_kernels import NO_RECURRENCE, recurrent_layers
from engine.models.rope import rope_of_layer


def model_constants(
    config: ModelConfig,
    packed: PackedDecoder,
    layers: Sequence[int],
    shape: HeadShape,
    places: StatePlaces | None = None,
) -> ModelConstants:
    """The constants of these layers, with heads of this shape, and states in these places."""
    are_recurrent = [config.is_recurrent(layer) for layer in layers]
    recurrent = NO_RECURRENCE
    if config.recurrent is not None and places is not None:
        weights = RecurrentWeights(
            packed.taps, packed.conv_biases, packed.rates, packed.rate_biases, packed.recurrent_norms
        )
        recurrent = recurrent_layers(weights, config.recurrent, config.norm_eps, places)
    return ModelConstants(
        weights=packed.weights,
        firsts=_numbers_of_qkv(config, layers),
        numbers=_numbers(config, layers),
        are_recurrent=np.array(are_recurrent, np.int64),
        output=packed.output,
        norms=packed.norms,
        final_norm=packed.final_norm,
        head_norms=packed.head_norms,
        activation=packed.activation,
        num_head_norms=_num_head_norms(config, layers, packed),
        windows=np.array([_window(config, layer) for layer in layers], np.int64),
        ropes=np.array([rope_of_layer(config, layer) for layer in layers], np.int64),
        eps=np.float32(config.norm_eps),
        shape=shape,
        kind=_kind(config),
        experts=_experts(config, packed, layers),
        latent=_latent(config, packed),
        recurrent=recurrent,
        mix_at=mix_address() if config.recurrent is not None else 0,
    )


def _numbers(config: ModelConfig, layers: Sequence[int]) -> Int64s:
    """The number of each layer among those with KV, or among recurrent ones."""
    first, numbers = config.num_kv_layers_before(layers[0]), []
    for layer in layers:
        if config.recurrent is not None and config.is_recurrent(layer):
            numbers.append(config.recurrent.num_before(layer))
        else:
            numbers.append(config.num_kv_layers_before(layer) - first)
    return np.array(numbers, np.int64)


def _num_head_norms(config: ModelConfig, layers: Sequence[int], packed: PackedDecoder) -> Int64s:
    counts = [packed.head_norms.shape[1] if config.of_layer(layer).qk_norm else 0 for layer in layers]
    return np.array(counts, np.int64)


def _window(config: ModelConfig, layer: int) -> Window:
    window = config.windows[layer]
    if window is None:
        return Window(NO_WINDOW)
    return Window(1, window) if config.windows_are_chunks else Window(window)


def _kind(config: ModelConfig) -> Kind:
    return Kind(
        parallel=config.block.startswith("parallel"),
        norms_inputs="input_norm" in BLOCKS[config.block],
        sandwich="attn_out_norm" in BLOCKS[config.block],
        gated=config.gated,
        activation=KERNEL_ACTIVATIONS[config.activation],
        centred_heads=config.norm == "layer",
        norms_rotated=config.qk_norm_rotated,
        clip_qkv=np.float32(config.clip_qkv or 0.0),
        gates_attention=config.attention_gate,
    )


def _numbers_of_qkv(config: ModelConfig, layers: Sequence[int]) -> Int64s:
    """The number of each layer's `qkv`, or of what recurrent layers have instead, among the matrices."""
    names = [matrix_names(config, layer) for layer in layers]
    firsts = np.cumsum([0, *map(len, names)], dtype=np.int64)[:-1]
    return firsts + np.array([int(of_layer[0] == "q_b") for of_layer in names], np.int64)


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
            num_experts=facts.num_experts,
            top_k=facts.top_k,
            normalised=facts.normalised,
            scoring=KERNEL_SCORINGS[facts.scoring],
            num_groups=facts.num_groups,
            top_groups=facts.top_groups,
            group_best=facts.group_best,
            routed_scale=np.float32(facts.routed_scale),
            mixer_range=np.float32(facts.mixer_range),
        ),
        num_experts=facts.num_experts,
        width=facts.intermediate_size,
        shared_width=facts.shared_size,
        activation=KERNEL_ACTIVATIONS[config.activation],
        scales_inputs=facts.scales_inputs,
    )
