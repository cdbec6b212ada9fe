"""Llama 4: most layers attend in chunks, the others have no rotary positions and scale queries by their position;
rotated heads are normed without weights; experts get rows times their scores, beside a shared expert.
"""

from dataclasses import replace
from math import inf, nextafter

from checkpoint.config_json import RawConfig, flag, integer, integers, number, texts
from engine.models.experts_config import ExpertsConfig
from engine.models.families.layer_kinds import default_rope
from engine.models.model_config import ModelConfig, RopeConfig
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_NAMES = TensorNames(
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert="feed_forward.experts.{}",
    stacked_up="feed_forward.experts.gate_up_proj",
    stacked_down="feed_forward.experts.down_proj",
    stacked_transposed=True,
    shared_expert="feed_forward.shared_expert",
    interleaved_rotary=True,
)


def llama4(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """The text model. `intermediate_size` is that of experts; MLPs have their own."""
    bias, norms = flag(raw, "attention_bias", default=False), flag(raw, "use_qk_norm", default=True)
    unrotated, rope = _unrotated(plain, raw), default_rope(plain, raw, 500_000.0)
    if rope.kind == "llama3" and rope.high_freq_factor == rope.low_freq_factor:  # no frequencies are in between
        rope = replace(rope, high_freq_factor=nextafter(rope.low_freq_factor, inf))
    experts = ExpertsConfig(
        num_experts=integer(raw, "num_local_experts", default=16),
        top_k=integer(raw, "num_experts_per_tok", default=1),
        intermediate_size=plain.intermediate_size,
        normalised=False,
        layers=_expert_layers(plain, raw),
        shared_size=plain.intermediate_size,
        scoring="sigmoid",
        scales_inputs=True,
    )
    return replace(
        plain,
        tensors=_NAMES,
        norm_eps=number(raw, "rms_norm_eps", default=1e-5),
        intermediate_size=integer(raw, "intermediate_size_mlp", default=16_384),
        rope=rope,
        unrotated=unrotated,
        unrotated_rope=_growth(rope, raw) if unrotated else None,
        windows=_chunks(plain, raw, unrotated),
        windows_are_chunks=True,
        qk_norm=norms,
        qk_norm_weight=not norms,
        qk_norm_rotated=norms,
        qkv_bias=bias,
        o_bias=bias,
        experts=experts if any(experts.layers) else None,
    )


def _unrotated(plain: ModelConfig, raw: RawConfig) -> tuple[int, ...]:
    if marks := integers(raw, "no_rope_layers"):
        if len(marks) < plain.num_layers:
            raise ConfigurationError(f"config.json: no_rope_layers must have {plain.num_layers} numbers")
        return tuple(layer for layer in range(plain.num_layers) if not marks[layer])
    interval = integer(raw, "no_rope_layer_interval", default=4)
    return tuple(range(interval - 1, plain.num_layers, interval))


def _growth(rope: RopeConfig, raw: RawConfig) -> RopeConfig:
    """The rope of layers without rotation: it only has the factor of queries."""
    growth = number(raw, "attn_scale", default=0.1, may_be_zero=True)
    return RopeConfig(
        kind="default",
        theta=rope.theta,
        dim=0,
        original_positions=integer(raw, "floor_scale", default=8192),
        query_growth=growth if raw.get("attn_temperature_tuning", True) else 0.0,  # in early files it is 4
        growth_offset=1,
    )


def _chunks(plain: ModelConfig, raw: RawConfig, unrotated: tuple[int, ...]) -> tuple[int | None, ...]:
    """The size of the chunks in which each layer attends."""
    if "attention_chunk_size" in raw and raw["attention_chunk_size"] is None:
        return (None,) * plain.num_layers
    chunk = integer(raw, "attention_chunk_size", default=8192)
    kinds = texts(raw, "layer_types")
    if other := sorted(set(kinds) - {"chunked_attention", "full_attention"}):
        raise ConfigurationError(
            f"config.json: layer_types may name full_attention and chunked_attention, not {other[0]!r:.100}"
        )
    if kinds:
        return tuple(chunk if kind == "chunked_attention" else None for kind in kinds)
    return tuple(None if layer in unrotated else chunk for layer in range(plain.num_layers))


def _expert_layers(plain: ModelConfig, raw: RawConfig) -> tuple[bool, ...]:
    step = integer(raw, "interleave_moe_layer_step", default=1)
    chosen = range(step - 1, plain.num_layers, step) if raw.get("moe_layers") is None else integers(raw, "moe_layers")
    return tuple(layer in chosen for layer in range(plain.num_layers))
