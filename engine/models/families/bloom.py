"""Families with ALiBi positions: BLOOM, which has a norm after the embedding, and MPT, which has no biases."""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, number, optional_number, refuse, section
from engine.models.model_config import ModelConfig
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_TENSORS = TensorNames(
    embed="transformer.word_embeddings",
    embed_norm="transformer.word_embeddings_layernorm",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}",
    qkv=("self_attention.query_key_value",),
    o="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    grouped_qkv=True,
)


def bloom(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """BLOOM and BLOOMZ, which have the same architecture."""
    refuse(raw, apply_residual_connection_post_layernorm=True)
    return replace(
        plain,
        tensors=_TENSORS,
        norm="layer",
        norm_bias=True,
        embed_norm=True,
        positions="alibi",
        activation="gelu_pytorch_tanh",
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )


_MPT = TensorNames(
    embed="transformer.wte",
    final_norm="transformer.norm_f",
    layer="transformer.blocks.{}",
    input_norm="norm_1",
    qkv=("attn.Wqkv",),
    o="attn.out_proj",
    post_norm="norm_2",
    up=("ffn.up_proj",),
    down="ffn.down_proj",
)


def mpt(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """MPT 7B and 30B."""
    attention = section(raw, "attn_config")
    refuse(raw, no_bias=False)
    refuse(attention, qk_ln=True, alibi=False, prefix_lm=True)
    for stated, member, known in (
        (raw, "norm_type", ("layernorm", "low_precision_layernorm")),
        (attention, "attn_type", ("multihead_attention",)),
    ):
        if (value := stated.get(member) or known[0]) not in known:
            raise ConfigurationError(f"config.json: {member} {value!r:.100} is not supported")
    if number(attention, "alibi_bias_max", default=8) != 8 or raw.get("expansion_ratio", 4) != 4:
        raise ConfigurationError("config.json: alibi_bias_max must be 8, and expansion_ratio 4, as in transformers")
    if raw.get("logit_scale") is not None:
        raise ConfigurationError("config.json: logit_scale is not supported")
    return replace(
        plain,
        tensors=_MPT,
        norm="layer",
        norm_eps=number(raw, "layer_norm_epsilon", default=1e-5),
        positions="alibi",
        attention_scale=optional_number(attention, "softmax_scale"),
        clip_qkv=optional_number(attention, "clip_qkv"),
        activation="gelu",
        gated=False,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )
