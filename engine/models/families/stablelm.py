"""StableLM: Llama with layer norms, and a quarter of each head rotated."""

from dataclasses import replace

from engine.models.facts import ModelConfig, RawConfig
from engine.models.reading import refuse
from engine.models.rope_config import parse_rope


def stablelm(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """StableLM 3B, Zephyr 3B and StableLM 2 1.6B; 2 12B, which norms its queries and keys, is refused."""
    refuse(raw, qk_layernorm=True)
    return replace(
        plain,
        norm="layer",
        norm_bias=True,
        block="parallel-shared" if raw.get("use_parallel_residual", False) else "sequential",
        rope=parse_rope({"partial_rotary_factor": 0.25, **raw}, plain.max_position_embeddings, plain.head_dim),
        qkv_bias=bool(raw.get("use_qkv_bias", False)),
    )
