"""Granite 3 and its kin: factors of embeddings, scores, sublayers and logits.

Granite SWA has windows, sinks and layers without rotary positions. HyperCLOVA X norms what attention and MLP compute.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, layer_windows, number, numbers
from engine.models.model_config import ModelConfig, RopeConfig, sliding_window
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError


def granite(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    bias = flag(raw, "attention_bias", default=False)
    return replace(
        plain,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(raw, "mlp_bias", default=False),
        embed_scale=number(raw, "embedding_multiplier", default=1.0),
        attention_scale=number(raw, "attention_multiplier", default=1.0),
        residual_scale=number(raw, "residual_multiplier", default=1.0),
        logit_scale=1.0 / number(raw, "logits_scaling", default=1.0),
    )


def granite_swa(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Granite with sinks, windows in three of four layers, and bases of rotary positions by layer, 0 for none."""
    types = raw.get("layer_types") or [
        "sliding_attention" if n % 4 else "full_attention" for n in range(plain.num_layers)
    ]
    windows = layer_windows({"layer_types": types}, plain.num_layers, sliding_window(raw, 128))
    thetas = numbers(raw, "layer_rope_theta", may_be_zero=True) or (plain.rope.theta,) * plain.num_layers
    rope, window_rope = (
        _rope_of(
            plain, {theta for theta, window in zip(thetas, windows, strict=True) if (window is not None) == has_window}
        )
        for has_window in (False, True)
    )
    return replace(
        granite(plain, raw),
        windows=windows,
        rope=rope or window_rope or plain.rope,
        window_rope=None if window_rope == rope else window_rope,
        unrotated=tuple(layer for layer, theta in enumerate(thetas) if not theta),
        attention_sinks=True,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )


def _rope_of(plain: ModelConfig, thetas: set[float]) -> RopeConfig | None:
    """Rotary positions of layers with these bases, None if all of them do without. Raises ConfigurationError."""
    bases = sorted(thetas - {0})
    if len(bases) > 1:
        raise ConfigurationError(
            "config.json: layer_rope_theta may have one base for layers with a window, and one for those without, not "
            f"{bases[0]:g} and {bases[1]:g}"
        )
    return replace(plain.rope, theta=bases[0]) if bases else None


_HYPERCLOVAX = TensorNames(attn_out_norm="post_norm1", mlp_out_norm="post_norm2")


def hyperclovax(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """HyperCLOVA X SEED Think. Its logits are multiplied by the factor by which Granite divides."""
    has_norms = flag(raw, "use_post_norm", default=True)
    return replace(
        granite(plain, raw),
        tensors=_HYPERCLOVAX if has_norms else plain.tensors,
        block="sandwich" if has_norms else "sequential",
        attention_scale=number(raw, "attention_multiplier", default=plain.head_dim**-0.5),
        logit_scale=number(raw, "logits_scaling", default=1.0),
    )
