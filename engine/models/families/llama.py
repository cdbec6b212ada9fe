"""Llama, Mistral and Qwen: RMS norms, rotary positions, a gated MLP."""

from dataclasses import replace

from engine.models.facts import ModelConfig, RawConfig
from engine.models.reading import layer_windows


def llama(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Llama 1 to 3, and models that use its architecture: Yi, Vicuna, SmolLM, DeepSeek LLM."""
    bias = bool(raw.get("attention_bias", False))
    return replace(plain, qkv_bias=bias, o_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))


def mistral(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Mistral, with the same window in all layers, or none."""
    return replace(plain, windows=(raw.get("sliding_window", 4096),) * plain.num_layers)


def qwen_windows(plain: ModelConfig, raw: RawConfig) -> tuple[int | None, ...]:
    """Windows of Qwen models: none unless `use_sliding_window` is set.

    `layer_types` lists the layers with a window; without it these are the layers from `max_window_layers` on.
    """
    if not raw.get("use_sliding_window", False):
        return plain.windows
    window = raw.get("sliding_window", 4096)
    if raw.get("layer_types") is not None:
        return layer_windows(raw, plain.num_layers, window)
    first = raw.get("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(plain.num_layers))


def qwen2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Qwen 1.5, 2 and 2.5, with biases of queries, keys and values."""
    return replace(plain, qkv_bias=True, windows=qwen_windows(plain, raw))


def qwen3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Qwen 3, with norms of queries and keys."""
    bias = bool(raw.get("attention_bias", False))
    return replace(plain, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=qwen_windows(plain, raw))
