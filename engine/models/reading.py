"""Helpers to read config.json, in which families use different keys for the same fact."""

from typing import Any

from checkpoint.model_files import POSITION_KEYS, VOCAB_KEYS
from engine.models.facts import ModelConfig, RawConfig
from engine.models.rope_config import parse_rope
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import DTYPE_BYTES

_HIDDEN_SIZE = ("hidden_size", "n_embd", "n_embed", "d_model")
_INNER_SIZE = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HEAD_DIM = ("head_dim", "kv_channels")
_NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon", "norm_eps")
_ACTIVATION = ("hidden_activation", "hidden_act", "activation_function", "activation")
_DEFAULT_POSITIONS = 2048


def first_of(raw: RawConfig, keys: tuple[str, ...], default: Any = None) -> Any:
    """The value of the first of these keys that is present and not null."""
    return next((raw[key] for key in keys if raw.get(key) is not None), default)


def integer(raw: RawConfig, *keys: str, default: int | None = None) -> int:
    """The value of the first present key as a positive integer. Raises ConfigurationError for other values."""
    value = first_of(raw, keys, default)
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"config.json: {keys[0]} must be a positive integer, got {value!r}")
    return value


def refuse(raw: RawConfig, **unsupported: Any) -> None:
    """Raise ConfigurationError if config.json has one of these keys with the unsupported value."""
    for key, value in unsupported.items():
        if raw.get(key) == value:
            raise ConfigurationError(f"config.json: {key} {value!r} is not supported")


def layer_windows(raw: RawConfig, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """The window per layer: `window` for layers that `layer_types` marks as sliding, or for all layers without it."""
    types = raw.get("layer_types")
    if types is None:
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def plain_config(raw: RawConfig, architecture: str) -> ModelConfig:
    """A ModelConfig from the keys that families share; all other fields keep their defaults."""
    num_heads = integer(raw, *_NUM_HEADS)
    hidden_size = integer(raw, *_HIDDEN_SIZE)
    num_layers = integer(raw, *_NUM_LAYERS)
    max_positions = integer(raw, *POSITION_KEYS, default=_DEFAULT_POSITIONS)
    head_dim = integer(raw, *_HEAD_DIM, default=hidden_size // num_heads)
    return ModelConfig(
        architecture=architecture,
        vocab_size=integer(raw, *VOCAB_KEYS),
        hidden_size=hidden_size,
        intermediate_size=integer(raw, *_INNER_SIZE, default=4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=integer(raw, "num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        norm_eps=float(first_of(raw, _NORM_EPS, 1e-6)),
        activation=str(first_of(raw, _ACTIVATION, "silu")),
        rope=parse_rope(raw, max_positions, head_dim),
        windows=(None,) * num_layers,
        tied=bool(raw.get("tie_word_embeddings", False)),
        dtype=weights_dtype(raw),
    )


def weights_dtype(raw: RawConfig) -> str:
    """The dtype of the weights, or float32 if config.json names none that is supported."""
    name = raw.get("dtype") or raw.get("torch_dtype")
    return name if name in DTYPE_BYTES else "float32"
