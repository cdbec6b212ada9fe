"""InternLM: Llama with attention biases (1), with one grouped qkv projection (2), or with optional biases (3)."""

from dataclasses import replace

from engine.models.facts import ModelConfig, RawConfig
from engine.models.tensor_names import TensorNames

_INTERNLM2 = TensorNames(
    embed="model.tok_embeddings",
    lm_head="output",
    input_norm="attention_norm",
    qkv=("attention.wqkv",),
    o="attention.wo",
    post_norm="ffn_norm",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    grouped_qkv=True,
)


def internlm(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """InternLM 7B and 20B, with one switch for all attention biases."""
    bias = bool(raw.get("bias", True))
    return replace(plain, qkv_bias=bias, o_bias=bias)


def internlm2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """InternLM 2 and 2.5, with grouped query, key and value rows in one tensor."""
    bias = bool(raw.get("bias", False))
    return replace(plain, tensors=_INTERNLM2, qkv_bias=bias, o_bias=bias)


def internlm3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """InternLM 3, with a separate switch for the biases of queries, keys and values."""
    bias = bool(raw.get("bias", False))
    return replace(plain, qkv_bias=bool(raw.get("qkv_bias", False)), o_bias=bias, mlp_bias=bias)
