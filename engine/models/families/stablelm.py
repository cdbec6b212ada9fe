"""StableLM: Llama with layer norms, and a quarter of each head rotated."""

from dataclasses import replace

from engine.models.facts import ModelConfig, RawConfig
from engine.models.reading import refuse
from engine.models.rope_config import rotated_dim


def stablelm(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """StableLM 3B, Zephyr 3B and StableLM 2 1.6B. StableLM 2 12B, which norms queries and keys, is refused."""
    refuse(raw, qk_layernorm=True)
    return replace(
        plain,
        norm="layer",
        norm_bias=True,
        block="parallel-shared" if raw.get("use_parallel_residual", False) else "sequential",
        rope=replace(plain.rope, dim=rotated_dim(raw, plain.head_dim, default=0.25)),
        qkv_bias=bool(raw.get("use_qkv_bias", False)),
    )
