"""Table of model families: what their config.json means. A new family of the same shape is one more entry.

Facts only: nothing here knows tensors. `parameters.py` holds the names of the weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

RawConfig = Mapping[str, Any]
Windows = tuple[int | None, ...]


def _never(raw: RawConfig) -> bool:
    return False


def _always(raw: RawConfig) -> bool:
    return True


def _flag(name: str) -> Callable[[RawConfig], bool]:
    return lambda raw: bool(raw.get(name, False))


def _no_windows(raw: RawConfig, num_layers: int) -> Windows:
    return (None,) * num_layers


def _same_window(raw: RawConfig, num_layers: int) -> Windows:
    return (raw.get("sliding_window", 4096),) * num_layers


def _qwen_windows(raw: RawConfig, num_layers: int) -> Windows:
    """Off unless `use_sliding_window`; then `layer_types` says which layers, else those from `max_window_layers` on."""
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    window = raw.get("sliding_window", 4096)
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture differs from the plain decoder (RMS norm, rotary positions, gated MLP, no biases)."""

    qkv_bias: Callable[[RawConfig], bool] = _never
    o_bias: Callable[[RawConfig], bool] = _never
    mlp_bias: Callable[[RawConfig], bool] = _never
    qk_norm: bool = False
    windows: Callable[[RawConfig, int], Windows] = _no_windows


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        qkv_bias=_flag("attention_bias"), o_bias=_flag("attention_bias"), mlp_bias=_flag("mlp_bias")
    ),
    "MistralForCausalLM": Family(windows=_same_window),
    "Qwen2ForCausalLM": Family(qkv_bias=_always, windows=_qwen_windows),
    "Qwen3ForCausalLM": Family(
        qkv_bias=_flag("attention_bias"), o_bias=_flag("attention_bias"), qk_norm=True, windows=_qwen_windows
    ),
}
