"""ChatGLM and GLM: half of each head is rotated, with neighbours paired; gate and up projection are one tensor."""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, number, refuse
from engine.models.model_config import ModelConfig, rotated_dim
from engine.models.tensor_names import TensorNames

_CHATGLM = TensorNames(
    embed="transformer.embedding.word_embeddings",
    final_norm="transformer.encoder.final_layernorm",
    lm_head="transformer.output_layer",
    layer="transformer.encoder.layers.{}",
    qkv=("self_attention.query_key_value",),
    o="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    interleaved_rotary=True,
)
_GLM = TensorNames(up=("mlp.gate_up_proj",), interleaved_rotary=True)
_GLM4 = replace(_GLM, attn_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm")


def chatglm(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """ChatGLM 2 and 3, and GLM-4 in its first format. `rope_ratio` multiplies the base, except in ChatGLM2-32K."""
    refuse(raw, rmsnorm=False, post_layer_norm=False, add_bias_linear=True, original_rope=False)
    refuse(raw, apply_residual_connection_post_layernorm=True)
    multi_query = flag(raw, "multi_query_attention", default=False)
    return replace(
        plain,
        tensors=_CHATGLM,
        num_kv_heads=integer(raw, "multi_query_group_num") if multi_query else plain.num_heads,
        rope=replace(plain.rope, dim=plain.head_dim // 2, theta=10_000.0 * number(raw, "rope_ratio", default=1.0)),
        qkv_bias=flag(raw, "add_qkv_bias", default=False),
    )


def glm(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """GLM-4 9B and GLM-Edge in the format of transformers."""
    rope = replace(plain.rope, dim=rotated_dim(raw, plain.head_dim, default=0.5))
    return replace(plain, tensors=_GLM, rope=rope, qkv_bias=flag(raw, "attention_bias", default=True))


def glm4(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """GLM-4 0414 and GLM-Z1, with norms after attention and MLP, too."""
    return replace(glm(plain, raw), tensors=_GLM4, block="sandwich")
