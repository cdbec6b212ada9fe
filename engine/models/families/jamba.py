"""Jamba: Mamba 1 in most layers, attention without rotary positions in the others, experts in some."""

from dataclasses import replace

from checkpoint.config_json import RawConfig, integer
from engine.models.families.mamba import channels_config
from engine.models.families.mixtures import softmax_experts
from engine.models.model_config import ModelConfig
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
    attention = _every(plain, raw, "attn_layer", period=8, offset=4)
    of_mamba = channels_config(plain, raw, integer(raw, "mamba_expand", default=2) * plain.hidden_size)
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
