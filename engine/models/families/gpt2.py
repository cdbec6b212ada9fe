"""GPT-2 and its relatives: learned positions, layer norms, a plain MLP, biases everywhere."""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, refuse
from engine.models.model_config import ModelConfig
from engine.models.tensor_names import TensorNames

_TENSORS = TensorNames(
    embed="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}",
    input_norm="ln_1",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    post_norm="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
)


def _plain_gpt(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    return replace(
        plain,
        tensors=_TENSORS,
        norm="layer",
        norm_bias=True,
        positions="learned",
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )


def gpt2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """GPT-2, whose matrices are stored as [inputs, outputs]."""
    refuse(raw, scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False, add_cross_attention=True)
    return replace(_plain_gpt(plain, raw), tensors=replace(_TENSORS, transposed=True))


def gpt_bigcode(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """StarCoder and SantaCoder: all query heads share one head of keys and values."""
    refuse(raw, scale_attn_weights=False, add_cross_attention=True)
    multi_query = flag(raw, "multi_query", default=True)
    return replace(
        _plain_gpt(plain, raw),
        tensors=replace(_TENSORS, grouped_qkv=not multi_query),
        num_kv_heads=1 if multi_query else plain.num_heads,
    )
