"""Gemma 4: layers without a window have wider heads, and fewer for keys and values; values are normed; the last layers
of small models read the KV of earlier ones, and add per-layer embeddings of a token; large ones have experts beside the
MLP. Norms do not add 1 to their weights, unlike those of Gemma 1 to 3.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, optional_number, refuse, rope_section, section
from engine.models.experts_config import ExpertsConfig
from engine.models.families.layer_kinds import windows_but_every
from engine.models.model_config import ModelConfig, RopeConfig, parse_rope, sliding_window
from engine.models.per_layer_config import LayerSizes, PerLayerConfig, common_row
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_NAMES = TensorNames(
    attn_out_norm="post_attention_layernorm",
    post_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    router="router.proj",
    expert="experts.{}",
    stacked_up="experts.gate_up_proj",
    stacked_down="experts.down_proj",
)


def gemma4(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """The text model, dense or with experts."""
    refuse(raw, attention_bias=True, use_bidirectional_attention="all")
    windows = windows_but_every(6, plain, raw, sliding_window(raw, 512))
    windows = (*windows[:-1], None)  # transformers makes the last layer one of full attention
    layers = _layers(plain, raw, windows)
    heads, head_dim = common_row(layers)
    own_width = 0 if "hidden_size_per_layer_input" in raw else 256  # null is none
    width = integer(raw, "hidden_size_per_layer_input", default=own_width, least=0)
    rope, window_rope = _ropes(plain, raw, layers, windows)
    return replace(
        plain,
        tensors=_NAMES,
        block="sandwich",
        num_kv_heads=heads,
        head_dim=head_dim,
        activation=plain.activation if raw.get("hidden_activation") else "gelu_pytorch_tanh",
        embed_scale=plain.hidden_size**0.5,
        attention_scale=1.0,
        logit_softcap=optional_number(raw, "final_logit_softcapping"),
        tied=flag(raw, "tie_word_embeddings", default=True),
        windows=windows,
        counts_scaled_positions=True,
        rope=rope,
        window_rope=window_rope,
        experts=_experts(plain, raw) if flag(raw, "enable_moe_block", default=False) else None,
        per_layer=PerLayerConfig(
            layers, width, integer(raw, "vocab_size_per_layer_input", default=262_144) if width else 0
        ),
    )


def gemma4_unified(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """The text model of 12B: dense, nothing added for the token itself."""
    more = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    return gemma4(plain, {"sliding_window": 1024, **raw, **more})


def _layers(plain: ModelConfig, raw: RawConfig, windows: tuple[int | None, ...]) -> tuple[LayerSizes, ...]:
    """Each layer's sizes. Published files name those of layers without a window, newer ones those of each layer."""
    shared = integer(raw, "num_kv_shared_layers", default=0, least=0)
    sources = kv_sources(windows, plain.num_layers - shared)
    keys_are_values = flag(raw, "attention_k_eq_v", default=False)
    double = shared > 0 and flag(raw, "use_double_wide_mlp", default=False)
    kv_heads, head_dim = integer(raw, "num_key_value_heads", default=4), integer(raw, "head_dim", default=256)
    wide = {"head_dim": integer(raw, "global_head_dim", default=512)}
    if keys_are_values and raw.get("num_global_key_value_heads") is not None:
        wide["num_key_value_heads"] = integer(raw, "num_global_key_value_heads")
    stated = section(raw, "per_layer_config")  # by numbers such as "05"
    stated_of = {int(number): section(stated, number) for number in stated}
    layers = []
    for layer, window in enumerate(windows):
        own = stated_of.get(layer, {}) if stated else wide if window is None else {}
        layers.append(
            LayerSizes(
                head_dim=integer(own, "head_dim", default=head_dim),
                num_kv_heads=integer(own, "num_key_value_heads", default=kv_heads),
                intermediate_size=plain.intermediate_size * (2 if double and sources[layer] != layer else 1),
                kv_source=sources[layer],
                keys_are_values=keys_are_values and window is None,
            )
        )
    return tuple(layers)


def kv_sources(windows: tuple[int | None, ...], num_own: int) -> tuple[int, ...]:
    """Layers from `num_own` on read the KV of the last layer before it that has a window like theirs, or none."""
    last = {window: layer for layer, window in enumerate(windows[: max(num_own, 0)])}
    if not set(windows) <= set(last):
        raise ConfigurationError("config.json: num_kv_shared_layers leaves no layer of a kind that has KV of its own")
    return tuple(layer if layer < num_own else last[window] for layer, window in enumerate(windows))


def _ropes(
    plain: ModelConfig, raw: RawConfig, layers: tuple[LayerSizes, ...], windows: tuple[int | None, ...]
) -> tuple[RopeConfig, RopeConfig]:
    """Rotary positions of layers without and with a window, each over a whole head of theirs."""
    stored = rope_section(raw)
    widths = {window is None: sizes.head_dim for window, sizes in zip(windows, layers, strict=True)}
    full: RawConfig = {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25}
    local: RawConfig = {"rope_type": "default", "rope_theta": 10_000.0}
    if stored:
        full, local = (section(stored, kind) for kind in ("full_attention", "sliding_attention"))
    if not full or not local:
        raise ConfigurationError("config.json: rope_parameters needs full_attention and sliding_attention")
    positions = plain.max_position_embeddings
    rope = parse_rope({"rope_parameters": full}, positions, widths[True])
    return rope, parse_rope({"rope_parameters": local}, positions, widths.get(False, widths[True]))


def _experts(plain: ModelConfig, raw: RawConfig) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=integer(raw, "num_experts"),
        top_k=integer(raw, "top_k_experts"),
        intermediate_size=integer(raw, "moe_intermediate_size"),
        normalised=True,
        layers=(True,) * plain.num_layers,
    )
