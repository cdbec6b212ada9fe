"""Granite: Llama with factors of the embedding, the scores, the outputs of attention and MLP, and the logits."""

from dataclasses import replace

from engine.models.facts import ModelConfig, RawConfig
from engine.models.families.llama import llama


def granite(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    return replace(
        llama(plain, raw),
        embed_scale=float(raw.get("embedding_multiplier", 1.0)),
        attention_scale=float(raw.get("attention_multiplier", 1.0)),
        residual_scale=float(raw.get("residual_multiplier", 1.0)),
        logit_scale=1.0 / float(raw.get("logits_scaling", 1.0)),
    )
