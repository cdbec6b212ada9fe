"""ModelConfig: the facts of a checkpoint that the decoder needs, read from its config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.architectures import FAMILIES, Family
from engine.models.rope_config import RopeConfig, parse_rope
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import DTYPE_BYTES

SUPPORTED_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Facts of a decoder-only model. `windows` holds each layer's sliding window in tokens, None for full attention."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: str
    rope: RopeConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    dtype: str

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and generated tokens, that the model is meant for."""
        return self.rope.max_positions(self.max_position_embeddings)

    @property
    def shareable_prefixes(self) -> bool:
        """True if equal leading tokens have equal KV whatever follows, as prefix caching requires."""
        return not self.rope.depends_on_prompt_length


def load_config(model_dir: Path) -> ModelConfig:
    """Read `config.json` of a Hugging Face checkpoint; ConfigurationError if it is absent or not supported."""
    raw = _read(Path(model_dir) / "config.json")
    name, family = _family_of(raw)
    if raw.get("quantization_config"):
        raise ConfigurationError(f"{model_dir}: quantised checkpoints are not supported")
    num_layers = _integer(raw, "num_hidden_layers")
    num_heads = _integer(raw, "num_attention_heads")
    hidden_size = _integer(raw, "hidden_size")
    max_positions = _integer(raw, "max_position_embeddings")
    config = ModelConfig(
        architecture=name,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or hidden_size // num_heads,
        max_position_embeddings=max_positions,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=_activation(raw),
        rope=parse_rope(raw, max_positions),
        windows=family.windows(raw, num_layers),
        qkv_bias=family.qkv_bias(raw),
        o_bias=family.o_bias(raw),
        mlp_bias=family.mlp_bias(raw),
        qk_norm=family.qk_norm,
        tied=bool(raw.get("tie_word_embeddings", False)),
        dtype=_dtype(raw),
    )
    _check(config)
    return config


def _read(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{path} is not a JSON object")
    return raw


def _family_of(raw: Mapping[str, Any]) -> tuple[str, Family]:
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    raise ConfigurationError(
        f"architecture {', '.join(names) or '(none given)'} is not supported; supported: {', '.join(FAMILIES)}"
    )


def _integer(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _activation(raw: Mapping[str, Any]) -> str:
    name = raw.get("hidden_act", "silu")
    if name not in SUPPORTED_ACTIVATIONS:
        raise ConfigurationError(f"activation {name!r} is not supported; supported: {', '.join(SUPPORTED_ACTIVATIONS)}")
    return str(name)


def _dtype(raw: Mapping[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype")
    return name if name in DTYPE_BYTES else "float32"


def _check(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ConfigurationError(
            f"num_attention_heads ({config.num_heads}) must be a multiple of num_key_value_heads "
            f"({config.num_kv_heads})"
        )
    if config.head_dim % 2:
        raise ConfigurationError(f"head_dim must be even for rotary positions, got {config.head_dim}")
    if len(config.windows) != config.num_layers:
        raise ConfigurationError(f"layer_types has {len(config.windows)} entries for {config.num_layers} layers")
