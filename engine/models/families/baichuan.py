"""Baichuan: Llama with one tensor for queries, keys and values; 13B has ALiBi in place of rotary positions."""

from dataclasses import replace

from engine.models.facts import ModelConfig, RawConfig
from engine.models.reading import integer
from engine.models.tensor_names import TensorNames

_TENSORS = TensorNames(qkv=("self_attn.W_pack",))
_BAICHUAN2_VOCAB = 125_696


def baichuan(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Baichuan 1 and 2. Of 13B, whose positions have no end, config.json has `model_max_length` alone; the second
    generation, which only its vocabulary tells, multiplies with an output matrix whose rows have length 1.
    """
    has_alibi = raw.get("max_position_embeddings") is None
    return replace(
        plain,
        tensors=replace(_TENSORS, unit_lm_head=plain.vocab_size == _BAICHUAN2_VOCAB),
        positions="alibi" if has_alibi else "rotary",
        max_position_embeddings=integer(raw, "max_position_embeddings", "model_max_length"),
    )
