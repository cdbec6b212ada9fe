"""Models with multi-head latent attention: DeepSeek V2 and V3 with R1, Moonlight and Kimi K2, GLM-4.7-Flash, Mistral
Small 4, and two without experts, Youtu-LLM and MiniCPM 3.
"""

from dataclasses import replace
from math import sqrt

from checkpoint.config_json import (
    RawConfig,
    flag,
    integer,
    number,
    refuse,
    rope_section,
    text,
    texts,
    yarn_mscale,
)
from engine.models.experts_config import ExpertsConfig
from engine.models.families.layer_kinds import default_rope
from engine.models.latent_config import LatentConfig
from engine.models.model_config import ModelConfig, rotated_dim
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_HEADS = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_V2 = _HEADS | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
_V3 = _HEADS | {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}
_GLM = _HEADS | {
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
}
_MINICPM3 = {
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
_MISTRAL4 = _HEADS | {
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
}
"""Facts that config.json leaves out."""


def deepseek_v2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """DeepSeek V2, V2-Lite and Coder V2. Groups of experts are as good as their best one."""
    refuse(raw, scoring_func="sigmoid", norm_topk_prob=True, mlp_bias=True)
    raw = {**_V2, **raw}
    experts, method = replace(_experts(plain, raw), group_best=1), text(raw, "topk_method", default="greedy")
    if method == "greedy":
        experts = replace(experts, num_groups=1, top_groups=1)
    elif method != "group_limited_greedy":
        raise ConfigurationError(f"config.json: topk_method {method!r:.100} is not supported")
    return replace(_latent(plain, raw, interleaved=True), experts=experts)


def deepseek_v3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """DeepSeek V3, V3.1 and R1, Moonlight, Kimi K2."""
    return _with_sigmoid(plain, {**_V3, **raw})


def glm4_moe_lite(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """GLM-4.7-Flash, which may list the layers with experts."""
    plain = replace(plain, norm_eps=number(raw, "rms_norm_eps", default=1e-5))
    return _with_sigmoid(plain, {**_GLM, **raw})


def youtu(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Youtu-LLM 2B."""
    interleaved = flag(raw, "rope_interleave", default=True)
    tied = flag(raw, "tie_word_embeddings", default=True)
    return replace(_latent(plain, {**_HEADS, **raw}, interleaved=interleaved), tied=tied)


def minicpm3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """MiniCPM 3 4B, with factors of embedding, residual and logits, whose null is none."""
    raw = {**_MINICPM3, **raw}
    own = plain.hidden_size // plain.num_heads
    depth = number(raw, "scale_depth", default=sqrt(plain.num_layers))
    return replace(
        _latent(plain, {**raw, "v_head_dim": integer(raw, "v_head_dim", default=own)}, interleaved=False),
        embed_scale=number(raw, "scale_emb", default=1.0),
        residual_scale=depth / sqrt(plain.num_layers),
        logit_scale=number(raw, "dim_model_base", default=plain.hidden_size) / plain.hidden_size,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )


_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def mistral4(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Mistral Small 4, whose queries grow with their position; experts are chosen by a softmax. Its factor of rotated
    dimensions follows from theirs.
    """
    raw = {**_MISTRAL4, **raw}
    rotated, plain_dim = integer(raw, "qk_rope_head_dim"), integer(raw, "qk_nope_head_dim")
    if rotated_dim(raw, rotated + plain_dim, default=rotated / (rotated + plain_dim)) != rotated:
        raise ConfigurationError("config.json: partial_rotary_factor does not fit qk_rope_head_dim")
    stored = {**(rope_section(raw) or _MISTRAL4_ROPE), "partial_rotary_factor": 1.0}
    raw = {**raw, "rope_parameters": stored, "rope_scaling": None, "partial_rotary_factor": None}
    growth = number(stored, "llama_4_scaling_beta", default=0.0, may_be_zero=True)
    rope = replace(default_rope(plain, raw, 10_000.0), query_growth=growth)
    experts = replace(_experts(plain, raw), normalised=flag(raw, "norm_topk_prob", default=True), wide_router=False)
    interleaved = flag(raw, "rope_interleave", default=True)
    return replace(_latent(replace(plain, rope=rope), raw, interleaved=interleaved), experts=experts)


def _with_sigmoid(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    refuse(raw, scoring_func="softmax", topk_method="greedy")
    normalised = flag(raw, "norm_topk_prob", default=True)
    experts = replace(_experts(plain, raw), scoring="sigmoid", choice_bias=True, normalised=normalised)
    return replace(_latent(plain, raw, interleaved=flag(raw, "rope_interleave", default=True)), experts=experts)


def _experts(plain: ModelConfig, raw: RawConfig) -> ExpertsConfig:
    inner, step = integer(raw, "moe_intermediate_size"), integer(raw, "moe_layer_freq", default=1)
    first = integer(raw, "first_k_dense_replace", default=0, least=0)
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
        kv_rank=integer(raw, "kv_lora_rank"),
        plain_dim=integer(raw, "qk_nope_head_dim"),
        value_dim=integer(raw, "v_head_dim"),
        query_rank=0 if raw["q_lora_rank"] is None else integer(raw, "q_lora_rank"),
    )
    rotated = integer(raw, "qk_rope_head_dim")
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
