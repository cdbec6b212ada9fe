"""Reads a checkpoint's config.json: first the keys that families share, then the differences of the model's family.

Decoder-only models have a ModelConfig, encoder-decoder models an EncoderDecoderConfig.
"""

from dataclasses import replace
from pathlib import Path

from checkpoint.model_files import NO_ROPE_OVERRIDE, RopeOverride, read_json
from engine.models.encoder_decoder.config import ARCHITECTURES, EncoderDecoderConfig, parse_encoder_decoder
from engine.models.facts import ModelConfig, RawConfig
from engine.models.families import FAMILIES
from engine.models.families.family import Family
from engine.models.reading import plain_config
from mesh.domain.errors import ConfigurationError

__all__ = ["AnyConfig", "EncoderDecoderConfig", "ModelConfig", "load_config", "load_decoder_config"]

AnyConfig = ModelConfig | EncoderDecoderConfig

SUPPORTED_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")


def load_config(model_dir: Path, rope: RopeOverride = NO_ROPE_OVERRIDE) -> AnyConfig:
    """Read `config.json` of a Hugging Face checkpoint. `rope` overrides its rotary positions.

    Raises ConfigurationError if the file is absent, or the model is not supported.
    """
    raw = rope.apply(read_json(Path(model_dir) / "config.json"))
    if raw.get("quantization_config"):
        raise ConfigurationError(f"{model_dir}: quantised checkpoints are not supported")
    for architecture in raw.get("architectures") or []:
        if architecture in ARCHITECTURES:
            _require_rotary(rope, architecture, has_rotary=False)
            return parse_encoder_decoder(raw, architecture)
    name, family = _family_of(raw)
    config = family.facts(plain_config(raw, name), raw)
    _require_rotary(rope, name, has_rotary=config.positions == "rotary")
    if rope.base:
        config = replace(config, rope=replace(config.rope, theta=rope.base))
    if rope.scaling:
        config = replace(config, counts_scaled_positions=False)
    _check(config)
    return config


def _require_rotary(rope: RopeOverride, architecture: str, *, has_rotary: bool) -> None:
    if rope and not has_rotary:
        raise ConfigurationError(f"{architecture} has no rotary positions that rope_scaling or rope_theta could change")


def load_decoder_config(model_dir: Path) -> ModelConfig:
    """`load_config` for decoder-only models; raises ConfigurationError for encoder-decoder models."""
    config = load_config(model_dir)
    if isinstance(config, EncoderDecoderConfig):
        raise ConfigurationError(f"{model_dir}: this is for decoder-only models, not for {config.architecture}")
    return config


def _family_of(raw: RawConfig) -> tuple[str, Family]:
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    supported = ", ".join((*FAMILIES, *ARCHITECTURES))
    raise ConfigurationError(
        f"architecture {', '.join(names) or '(none given)'} is not supported; supported: {supported}"
    )


def _check(config: ModelConfig) -> None:
    if config.activation not in SUPPORTED_ACTIVATIONS:
        raise ConfigurationError(
            f"activation {config.activation!r} is not supported; supported: {', '.join(SUPPORTED_ACTIVATIONS)}"
        )
    if config.num_heads % config.num_kv_heads:
        raise ConfigurationError(
            f"num_attention_heads ({config.num_heads}) must be a multiple of num_key_value_heads "
            f"({config.num_kv_heads})"
        )
    if config.positions == "rotary" and (config.head_dim % 2 or config.rope.dim % 2):
        raise ConfigurationError(
            f"head_dim must be even for rotary positions, got {config.head_dim}, of which {config.rope.dim} are rotated"
        )
    if len(config.windows) != config.num_layers:
        raise ConfigurationError(f"layer_types has {len(config.windows)} entries for {config.num_layers} layers")
