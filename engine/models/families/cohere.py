"""Cohere's Command models: attention and MLP side by side on one layer norm without bias, neighbours rotated together.

Command R7B and Command A have windows in three of four layers, and no rotary positions in the others.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, number, refuse
from engine.models.families.layer_kinds import default_rope, windows_but_every
from engine.models.model_config import ModelConfig, sliding_window
from engine.models.tensor_names import TensorNames

_COHERE = TensorNames(interleaved_rotary=True)


def cohere(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Command R, R+ and Aya. In R+ each head of queries and keys has a layer norm of its own. The context length of the
    first release is in `model_max_length`.
    """
    bias = flag(raw, "attention_bias", default=False)
    return replace(
        plain,
        tensors=_COHERE,
        block="parallel-shared",
        norm="layer",
        norm_eps=number(raw, "layer_norm_eps", default=1e-5),
        qk_norm=flag(raw, "use_qk_norm", default=False),
        qk_norm_of="own",
        max_position_embeddings=integer(raw, "model_max_length", default=plain.max_position_embeddings),
        rope=default_rope(plain, raw, 500_000.0),
        logit_scale=number(raw, "logit_scale", default=0.0625),
        qkv_bias=bias,
        o_bias=bias,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )


def cohere2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Command R7B, Command A, and Aya Vision's text model."""
    refuse(raw, use_qk_norm=True, use_parallel_block=False, use_gated_activation=False)
    pattern = integer(raw, "sliding_window_pattern", "_sliding_window_pattern", default=4)
    windows = windows_but_every(pattern, plain, raw, sliding_window(raw, 4096))
    return replace(
        cohere(plain, raw),
        qk_norm_of="head",
        max_position_embeddings=plain.max_position_embeddings,
        rope=plain.rope,
        windows=windows,
        unrotated=tuple(layer for layer, window in enumerate(windows) if window is None),
    )
