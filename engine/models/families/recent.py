"""Dense families of 2024 and later that are close to Llama, each with a small difference.

SmolLM 3 has layers without rotary positions.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, integers
from engine.models.families.llama import llama
from engine.models.model_config import ModelConfig, layer_windows, parse_rope, sliding_window


def default_theta(plain: ModelConfig, raw: RawConfig, theta: float) -> ModelConfig:
    """`plain` with this base of rotary positions where config.json has none."""
    return replace(plain, rope=parse_rope({"rope_theta": theta, **raw}, plain.max_position_embeddings, plain.rope.dim))


def smollm3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """SmolLM 3. `no_rope_layers` has a 0 for each layer without rotary positions; if it is absent, every fourth is."""
    interval = integer(raw, "no_rope_layer_interval", default=4)
    rotated = integers(raw, "no_rope_layers") or [(n + 1) % interval for n in range(plain.num_layers)]
    unrotated = tuple(layer for layer, is_rotated in enumerate(rotated[: plain.num_layers]) if not is_rotated)
    windows = plain.windows
    if flag(raw, "use_sliding_window", default=False):
        window = sliding_window(raw)
        windows = layer_windows(raw, plain.num_layers, window)
        if raw.get("layer_types") is None:
            windows = tuple(window if layer in unrotated else None for layer in range(plain.num_layers))
    return replace(
        llama(default_theta(plain, raw, 2_000_000.0), raw),
        unrotated=unrotated,
        windows=windows,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )
