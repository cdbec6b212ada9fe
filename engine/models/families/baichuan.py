"""Baichuan: Llama with one tensor for queries, keys and values; 13B uses ALiBi instead of rotary positions."""

from dataclasses import replace

from engine.models.facts import ModelConfig, RawConfig
from engine.models.reading import integer
from engine.models.tensor_names import TensorNames

_TENSORS = TensorNames(qkv=("self_attn.W_pack",))
_BAICHUAN2_VOCAB = 125_696


def baichuan(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Baichuan 1 and 2. The config.json of 13B (ALiBi) has `model_max_length` instead of `max_position_embeddings`.

    Baichuan 2 divides the rows of its output matrix by their lengths; only its vocabulary size identifies it.
    """
    has_alibi = raw.get("max_position_embeddings") is None
    return replace(
        plain,
        tensors=replace(_TENSORS, unit_lm_head=plain.vocab_size == _BAICHUAN2_VOCAB),
        positions="alibi" if has_alibi else "rotary",
        max_position_embeddings=integer(raw, "max_position_embeddings", "model_max_length"),
    )
