"""From a checkpoint's config.json to its facts: what families share, then what this family changes.

Decoder-only models have a ModelConfig, encoder-decoder models an EncoderDecoderConfig.
"""

from pathlib import Path

from engine.models.encoder_decoder.config import ARCHITECTURES, EncoderDecoderConfig, parse_encoder_decoder
from engine.models.facts import ModelConfig, RawConfig
from engine.models.families import FAMILIES
from engine.models.families.family import Family
from engine.models.reading import plain_config
from mesh.domain.errors import ConfigurationError
from mesh.model_files import read_json

__all__ = ["AnyConfig", "EncoderDecoderConfig", "ModelConfig", "load_config", "load_decoder_config"]

AnyConfig = ModelConfig | EncoderDecoderConfig

SUPPORTED_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")


def load_config(model_dir: Path) -> AnyConfig:
    """Read `config.json` of a Hugging Face checkpoint; ConfigurationError if it is absent or not supported."""
    raw = read_json(Path(model_dir) / "config.json")
    if raw.get("quantization_config"):
        raise ConfigurationError(f"{model_dir}: quantised checkpoints are not supported")
    for architecture in raw.get("architectures") or []:
        if architecture in ARCHITECTURES:
            return parse_encoder_decoder(raw, architecture)
    name, family = _family_of(raw)
    config = family.facts(plain_config(raw, name), raw)
    _check(config)
    return config


def load_decoder_config(model_dir: Path) -> ModelConfig:
    """`load_config` of a decoder-only model; ConfigurationError for another."""
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
