"""BLOOM: ALiBi positions, and a norm after the embedding."""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, refuse
from engine.models.model_config import ModelConfig
from engine.models.tensor_names import TensorNames

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
