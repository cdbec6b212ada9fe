"""Ling and Ring of inclusionAI: one tensor of queries, keys and values; experts chosen by a softmax (1.0, 1.5), or by
sigmoids and a bias (2.0).
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, refuse, text
from engine.models.families.mixtures import deepseek, sigmoid_experts
from engine.models.model_config import ModelConfig, rotated_dim
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_BAILING = TensorNames(
    embed="model.word_embeddings",
    qkv=("attention.query_key_value",),
    q_norm="attention.query_layernorm",
    k_norm="attention.key_layernorm",
    o="attention.dense",
    shared_expert="mlp.shared_experts",
    choice_bias="mlp.gate.expert_bias",
)


def bailing_moe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Ling-lite and Ling-plus; Ling and Ring 2.0 mini and flash."""
    refuse(raw, norm_head=True)
    norms_heads, bias = flag(raw, "use_qk_norm", default=False), flag(raw, "use_bias", default=False)
    if norms_heads and not flag(raw, "use_rmsnorm", default=False):
        raise ConfigurationError("config.json: use_qk_norm without use_rmsnorm is not supported")
    stated = {**raw, "n_routed_experts": integer(raw, "num_experts")}
    is_softmax = text(raw, "score_function", default="softmax") == "softmax"
    experts = deepseek(plain, stated).experts if is_softmax else sigmoid_experts(plain, stated)
    assert experts is not None
    shared = integer(raw, "moe_shared_expert_intermediate_size", "moe_intermediate_size")
    rotated = integer(raw, "rotary_dim", default=rotated_dim(raw, plain.head_dim))
    return replace(
        plain,
        tensors=_BAILING,
        rope=replace(plain.rope, dim=rotated),
        qk_norm=norms_heads,
        qkv_bias=bias or flag(raw, "use_qkv_bias", default=False),
        o_bias=bias,
        mlp_bias=bias,
        experts=replace(experts, shared_size=integer(raw, "num_shared_experts", default=0, least=0) * shared),
    )
