"""Falcon: layer norms, a plain MLP, attention and MLP in parallel; its variants differ in norms and key/value heads."""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer
from engine.models.model_config import ModelConfig
from engine.models.tensor_names import TensorNames

_TENSORS = TensorNames(
    embed="transformer.word_embeddings",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}",
    qkv=("self_attention.query_key_value",),
    o="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    grouped_qkv=True,
)
_TWO_NORMS = replace(_TENSORS, input_norm="ln_attn", post_norm="ln_mlp")


def falcon(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """7B (one key/value head, one norm), 40B and 180B (groups, two norms), 11B (groups, one norm), RW (ALiBi)."""
    is_new, bias = flag(raw, "new_decoder_architecture", default=False), flag(raw, "bias", default=False)
    block = "parallel-shared" if flag(raw, "parallel_attn", default=True) else "sequential"
    if is_new and integer(raw, "num_ln_in_parallel_attn", default=2) == 2:
        block = "parallel"
    return replace(
        plain,
        tensors=_TWO_NORMS if block == "parallel" else _TENSORS,
        num_kv_heads=_num_kv_heads(plain, raw, is_new=is_new),
        norm="layer",
        norm_bias=True,
        block=block,
        positions="alibi" if flag(raw, "alibi", default=False) else "rotary",
        # Falcon adds the ALiBi bias before it scales the scores.
        alibi_scale=plain.head_dim**-0.5,
        activation=str(raw.get("activation", "gelu")),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )


def _num_kv_heads(plain: ModelConfig, raw: RawConfig, *, is_new: bool) -> int:
    if is_new:
        return integer(raw, "num_kv_heads", default=plain.num_heads)
    return 1 if flag(raw, "multi_query", default=True) else plain.num_heads
