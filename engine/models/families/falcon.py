"""Falcon: layer norms, a plain MLP, attention and MLP in parallel; its variants differ in norms and key/value heads."""

from dataclasses import replace

from engine.models.model_config import ModelConfig, RawConfig, TensorNames, integer

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
    is_new, bias = bool(raw.get("new_decoder_architecture", False)), bool(raw.get("bias", False))
    block = "parallel-shared" if raw.get("parallel_attn", True) else "sequential"
    if is_new and (raw.get("num_ln_in_parallel_attn") or 2) == 2:
        block = "parallel"
    return replace(
        plain,
        tensors=_TWO_NORMS if block == "parallel" else _TENSORS,
        num_kv_heads=_num_kv_heads(plain, raw, is_new=is_new),
        norm="layer",
        norm_bias=True,
        block=block,
        positions="alibi" if raw.get("alibi", False) else "rotary",
        # Falcon adds the ALiBi bias before it scales the scores.
        alibi_scale=plain.head_dim**-0.5,
        activation=str(raw.get("activation", "gelu")),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=bool(raw.get("tie_word_embeddings", True)),
    )


def _num_kv_heads(plain: ModelConfig, raw: RawConfig, *, is_new: bool) -> int:
    if is_new:
        return integer(raw, "num_kv_heads", default=plain.num_heads)
    return 1 if raw.get("multi_query", True) else plain.num_heads
