"""Families that have nothing but Mamba 1."""

from dataclasses import replace

from checkpoint.config_json import RawConfig, first_of, flag, integer, number
from engine.models.model_config import ModelConfig
from engine.models.recurrent.config import ChannelScanConfig, RecurrentConfig
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_MAMBA = TensorNames(
    embed="backbone.embeddings",
    final_norm="backbone.norm_f",
    layer="backbone.layers.{}",
    input_norm="norm",
    recurrent="mixer",
)
_RANK = ("mamba_dt_rank", "time_step_rank")
_HEAD_DIM, _WIDTH_OF_HEAD = 64, 256


def mamba(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Mamba 130M to 2.8B. Blocks of KV, which hold nothing but states, are larger in wider models."""
    heads = max(1, plain.hidden_size // _WIDTH_OF_HEAD)
    # Falcon Mamba states both, and only the width is true.
    channels = integer(raw, "intermediate_size", default=integer(raw, "expand", default=2) * plain.hidden_size)
    return replace(
        plain,
        tensors=_MAMBA,
        block="single",
        norm_eps=number(raw, "layer_norm_epsilon", default=1e-5),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=_HEAD_DIM,
        rope=replace(plain.rope, dim=_HEAD_DIM),
        unrotated=tuple(range(plain.num_layers)),
        tied=flag(raw, "tie_word_embeddings", default=True),
        recurrent=channels_config(plain, raw, channels),
    )


def falcon_mamba(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Falcon Mamba 7B: Mamba with norms of steps, keys and queries."""
    config = mamba(plain, raw)
    assert config.recurrent is not None
    eps = number(raw, "mixer_rms_eps", default=1e-6)
    facts = replace(config.recurrent.channel_scan, norm="plain", norm_eps=eps)
    return replace(config, recurrent=replace(config.recurrent, channel_scan=facts))


def channels_config(plain: ModelConfig, raw: RawConfig, channels: int) -> RecurrentConfig:
    """Mamba 1 in all layers, in the words of all families."""
    if plain.activation != "silu":
        raise ConfigurationError(f"config.json: {plain.activation!r} as activation of Mamba 1 is not supported")
    is_said = first_of(raw, _RANK, "auto") != "auto"
    rank = integer(raw, *_RANK) if is_said else -(-plain.hidden_size // 16)
    return RecurrentConfig(
        kind="channels",
        layers=(True,) * plain.num_layers,
        kernel=integer(raw, "mamba_d_conv", "conv_kernel", default=4, least=2),
        channels=channels,
        bias=flag(raw, "mamba_proj_bias", default=flag(raw, "use_bias", default=False)),
        conv_bias=flag(raw, "mamba_conv_bias", default=flag(raw, "use_conv_bias", default=True)),
        num_heads=1,
        num_key_heads=1,
        key_dim=integer(raw, "mamba_d_state", "state_size", default=16),
        value_dim=channels,
        channel_scan=ChannelScanConfig(rank),
    )
