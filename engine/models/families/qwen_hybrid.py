"""Qwen 3.5 and Qwen3-Next: gated delta nets in three of four layers, and attention whose results are gated."""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, texts
from engine.models.experts_config import ExpertsConfig
from engine.models.families.layer_kinds import recurrent_layers
from engine.models.families.mixtures import qwen_experts
from engine.models.model_config import ModelConfig, rotated_dim
from engine.models.recurrent.config import RecurrentConfig
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_NAMES = TensorNames(recurrent="linear_attn", norm_offset=1.0)


def qwen3_5(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Qwen 3.5, dense."""
    return _hybrid(plain, raw)


def qwen3_5_moe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Qwen 3.5 with experts in all layers, and a gated shared expert."""
    experts = replace(qwen_experts(plain, raw), normalised=True)
    return replace(_hybrid(plain, raw), experts=_with_shared(experts, raw))


def qwen3_next(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Qwen3-Next: as Qwen 3.5 MoE, with the projections of delta nets in fewer tensors."""
    experts = replace(qwen_experts(plain, raw), normalised=flag(raw, "norm_topk_prob", default=True))
    return replace(_hybrid(plain, raw, is_fused=True), experts=_with_shared(experts, raw))


def _with_shared(experts: ExpertsConfig, raw: RawConfig) -> ExpertsConfig:
    shared = integer(raw, "shared_expert_intermediate_size", default=512)
    return replace(experts, shared_size=shared, shared_gate=True)


def _hybrid(plain: ModelConfig, raw: RawConfig, *, is_fused: bool = False) -> ModelConfig:
    key_heads, key_dim = (
        integer(raw, "linear_num_key_heads", default=16),
        integer(raw, "linear_key_head_dim", default=128),
    )
    heads, value_dim = (
        integer(raw, "linear_num_value_heads", default=32),
        integer(raw, "linear_value_head_dim", default=128),
    )
    if plain.activation != "silu":
        raise ConfigurationError(f"config.json: {plain.activation!r} as activation of delta nets is not supported")
    if heads % key_heads:
        raise ConfigurationError(
            f"linear_num_value_heads ({heads}) must be a multiple of linear_num_key_heads ({key_heads})"
        )
    bias, head_dim = flag(raw, "attention_bias", default=False), integer(raw, "head_dim", default=256)
    return replace(
        plain,
        tensors=_NAMES,
        head_dim=head_dim,
        rope=replace(plain.rope, dim=rotated_dim(raw, head_dim, default=0.25)),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        attention_gate=True,
        recurrent=RecurrentConfig(
            kind="delta",
            layers=_delta_layers(plain, raw),
            kernel=integer(raw, "linear_conv_kernel_dim", default=4, least=2),
            channels=2 * key_heads * key_dim + heads * value_dim,
            num_heads=heads,
            num_key_heads=key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            is_fused=is_fused,
        ),
    )


def _delta_layers(plain: ModelConfig, raw: RawConfig) -> tuple[bool, ...]:
    if raw.get("layer_types") is not None:
        return recurrent_layers(texts(raw, "layer_types"), "linear_attention")
    interval = integer(raw, "full_attention_interval", default=4)
    return tuple((layer + 1) % interval != 0 for layer in range(plain.num_layers))
