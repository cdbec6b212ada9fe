"""Families with Mamba 1: Mamba and Falcon Mamba have nothing else; in Jamba it is in place of attention in most layers,
the others have no rotary positions.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, first_of, flag, integer, number
from engine.models.families.mixtures import softmax_experts
from engine.models.model_config import ModelConfig
from engine.models.recurrent.config import ChannelScanConfig, RecurrentConfig
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_JAMBA = TensorNames(
    final_norm="model.final_layernorm",
    recurrent="mamba",
    post_norm="pre_ff_layernorm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert="feed_forward.experts.{}",
    stacked_up="feed_forward.experts.gate_up_proj",
    stacked_down="feed_forward.experts.down_proj",
)


def jamba(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Jamba, Jamba 1.5 to 1.7, and Jamba Reasoning 3B, which has no experts."""
    attention, of_mamba = _every(plain, raw, "attn_layer", period=8, offset=4), _channels(plain, raw)
    experts = None
    if integer(raw, "num_experts", default=16) > 1:
        facts = softmax_experts(plain, {"num_experts": 16, "num_experts_per_tok": 2, **raw}, normalised=False)
        experts = replace(facts, layers=_every(plain, raw, "expert_layer", period=2, offset=1))
    return replace(
        plain,
        tensors=_JAMBA,
        unrotated=tuple(range(plain.num_layers)),
        experts=experts,
        recurrent=replace(
            of_mamba,
            layers=tuple(not each for each in attention),
            channel_scan=replace(of_mamba.channel_scan, norm="weighted", norm_eps=plain.norm_eps),
        ),
    )


def _every(plain: ModelConfig, raw: RawConfig, name: str, *, period: int, offset: int) -> tuple[bool, ...]:
    """The layers of a kind: one in each period."""
    period = integer(raw, f"{name}_period", default=period)
    offset = integer(raw, f"{name}_offset", default=offset, least=0)
    if offset >= period:
        raise ConfigurationError(f"config.json: {name}_offset ({offset}) must be below {name}_period ({period})")
    return tuple(layer % period == offset for layer in range(plain.num_layers))


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
        recurrent=_channels(plain, raw),
    )


def falcon_mamba(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Falcon Mamba 7B: Mamba with norms of steps, keys and queries."""
    config = mamba(plain, raw)
    assert config.recurrent is not None
    eps = number(raw, "mixer_rms_eps", default=1e-6)
    facts = replace(config.recurrent.channel_scan, norm="plain", norm_eps=eps)
    return replace(config, recurrent=replace(config.recurrent, channel_scan=facts))


def _channels(plain: ModelConfig, raw: RawConfig) -> RecurrentConfig:
    """Mamba 1 in all layers, in the words of all families."""
    if plain.activation != "silu":
        raise ConfigurationError(f"config.json: {plain.activation!r} as activation of Mamba 1 is not supported")
    width, rank = integer(raw, "mamba_expand", "expand", default=2) * plain.hidden_size, -(-plain.hidden_size // 16)
    if first_of(raw, _RANK, "auto") != "auto":
        rank = integer(raw, *_RANK)
    return RecurrentConfig(
        kind="channels",
        layers=(True,) * plain.num_layers,
        kernel=integer(raw, "mamba_d_conv", "conv_kernel", default=4, least=2),
        channels=width,
        bias=flag(raw, "mamba_proj_bias", default=flag(raw, "use_bias", default=False)),
        conv_bias=flag(raw, "mamba_conv_bias", default=flag(raw, "use_conv_bias", default=True)),
        num_heads=1,
        num_key_heads=1,
        key_dim=integer(raw, "mamba_d_state", "state_size", default=16),
        value_dim=width,
        channel_scan=ChannelScanConfig(rank),
    )
