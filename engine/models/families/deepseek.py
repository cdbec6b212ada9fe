"""Models with multi-head latent attention: DeepSeek V2 and V3 with R1, Moonlight and Kimi K2, and GLM-4.7-Flash.

Layers of multi-token prediction, which follow the others in the checkpoint, are not used.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, number, refuse, text, texts
from engine.models.model_config import ExpertsConfig, LatentConfig, ModelConfig, TensorNames, rotated_dim, yarn_mscale
from mesh.domain.errors import ConfigurationError


def deepseek_v2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """DeepSeek V2, V2-Lite and Coder V2. Groups of experts are as good as their best one."""
    refuse(raw, scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True)
    experts = _experts(plain, raw)
    if text(raw, "topk_method", default="greedy") == "greedy":
        experts = replace(experts, num_groups=1, top_groups=1)
    mlp_bias = flag(raw, "mlp_bias", default=False)
    return replace(_latent(plain, raw, interleaved=True), mlp_bias=mlp_bias, experts=replace(experts, group_best=1))


def deepseek_v3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """DeepSeek V3, V3.1 and R1, Moonlight, Kimi K2, and GLM-4.7-Flash."""
    refuse(raw, scoring_func="softmax", topk_method="greedy")
    experts = replace(
        _experts(plain, raw),
        scoring="sigmoid",
        choice_bias=True,
        normalised=flag(raw, "norm_topk_prob", default=True),
    )
    return replace(_latent(plain, raw, interleaved=flag(raw, "rope_interleave", default=True)), experts=experts)


def _experts(plain: ModelConfig, raw: RawConfig) -> ExpertsConfig:
    inner, step = integer(raw, "moe_intermediate_size"), integer(raw, "moe_layer_freq", default=1)
    first = integer(raw, "first_k_dense_replace", default=1, least=0)
    layers = tuple(layer >= first and layer % step == 0 for layer in range(plain.num_layers))
    if raw.get("mlp_layer_types") is not None:
        layers = tuple(kind == "sparse" for kind in texts(raw, "mlp_layer_types"))
    return ExpertsConfig(
        num_experts=integer(raw, "n_routed_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        intermediate_size=inner,
        normalised=False,
        layers=layers,
        shared_size=integer(raw, "n_shared_experts", default=0, least=0) * inner,
        num_groups=integer(raw, "n_group", default=1),
        top_groups=integer(raw, "topk_group", default=1),
        routed_scale=number(raw, "routed_scaling_factor", default=1.0),
        wide_router=True,
    )


def _latent(plain: ModelConfig, raw: RawConfig, *, interleaved: bool) -> ModelConfig:
    refuse(raw, attention_bias=True)
    latent = LatentConfig(
        kv_rank=integer(raw, "kv_lora_rank", default=512),
        plain_dim=integer(raw, "qk_nope_head_dim", default=128),
        value_dim=integer(raw, "v_head_dim", default=128),
        query_rank=0 if raw.get("q_lora_rank", 0) is None else integer(raw, "q_lora_rank", default=1536),
    )
    rotated = integer(raw, "qk_rope_head_dim", default=64)
    if rotated_dim(raw, rotated) != rotated:
        raise ConfigurationError("config.json: partial_rotary_factor must be 1 beside qk_rope_head_dim")
    rope = replace(plain.rope, dim=rotated)
    stretch = 1.0 if rope.kind == "default" else yarn_mscale(rope.factor, rope.mscale_all_dim)
    names = TensorNames(
        qkv=(
            "self_attn.q_a_proj" if latent.query_rank else "self_attn.q_proj",
            "self_attn.kv_a_proj_with_mqa",
            "self_attn.kv_b_proj",
        ),
        q_norm="self_attn.q_a_layernorm",
        k_norm="self_attn.kv_a_layernorm",
        q_b="self_attn.q_b_proj",
        shared_expert="mlp.shared_experts",
        interleaved_rotary=interleaved,
    )
    return replace(
        plain,
        num_kv_heads=1,
        head_dim=rotated + latent.kv_rank,
        rope=rope,
        attention_scale=(latent.plain_dim + rotated) ** -0.5 * stretch**2,
        latent=latent,
        tensors=names,
    )
