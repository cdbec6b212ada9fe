"""Shared by several families: rotary positions that config.json leaves out, which layers have windows, with rotary
positions of their own, and which are recurrent.
"""

from typing import Any

from checkpoint.config_json import RawConfig, layer_windows, number, rope_section, section
from engine.models.model_config import ModelConfig, RopeConfig, parse_rope
from mesh.domain.errors import ConfigurationError


def default_rope(plain: ModelConfig, raw: RawConfig, theta: float, **parameters: Any) -> RopeConfig:
    """Rotary positions as config.json states them; `theta` is the default of the base, `parameters` of all the rest."""
    stored = rope_section(raw) or parameters
    return _rope_of(plain, raw, {"rope_theta": number(raw, "rope_theta", default=theta), **stored})


def rope_and_window_rope(plain: ModelConfig, raw: RawConfig, theta: float) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary positions of layers without a window, and of those with one if they differ. Older config.json files have
    one object, whose scaling is that of layers without a window; newer ones have one object for each kind. `theta`: the
    base that they leave out.
    """
    stored = rope_section(raw)
    base = {"rope_theta": number(raw, "rope_theta", default=theta)}
    full, window = base | dict(stored), base
    if "full_attention" in stored:
        full, window = (base | dict(section(stored, kind)) for kind in ("full_attention", "sliding_attention"))
    rope, window_rope = _rope_of(plain, raw, full), _rope_of(plain, raw, window)
    return rope, None if window_rope == rope else window_rope


def _rope_of(plain: ModelConfig, raw: RawConfig, parameters: RawConfig) -> RopeConfig:
    rest = {key: value for key, value in raw.items() if key not in ("rope_theta", "rope_scaling", "rope_parameters")}
    return parse_rope(rest | {"rope_parameters": parameters}, plain.max_position_embeddings, plain.rope.dim)


def windows_but_every(pattern: int, plain: ModelConfig, raw: RawConfig, window: int | None) -> tuple[int | None, ...]:
    """Windows of all layers but every `pattern`-th one. Newer config.json files list them in `layer_types`."""
    if raw.get("layer_types") is not None:
        return layer_windows(raw, plain.num_layers, window)
    return tuple(window if (layer + 1) % pattern else None for layer in range(plain.num_layers))


def recurrent_layers(
    types: tuple[str, ...], recurrent: str, attention: tuple[str, ...] = ("full_attention",)
) -> tuple[bool, ...]:
    """Mark the recurrent layers in `layer_types`, where they are called `recurrent`, and others as in `attention`."""
    if other := sorted(set(types) - {recurrent, *attention}):
        raise ConfigurationError(
            f"config.json: layer_types may name {', '.join(attention)} and {recurrent}, not {other[0]!r:.100}"
        )
    return tuple(kind == recurrent for kind in types)
