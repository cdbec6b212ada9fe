"""Granite 3 and its kin: factors of embeddings, scores, sublayers and logits.

Granite Swash has windows, sinks and layers without rotary positions. HyperCLOVA X norms what attention and MLP compute.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, layer_windows, number
from engine.models.families.layer_kinds import with_bases_of_layers
from engine.models.model_config import ModelConfig, sliding_window
from engine.models.tensor_names import TensorNames


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
    """Granite Swash: sinks, and windows in most layers."""
    config = replace(
        granite(plain, raw),
        windows=granite_windows(plain, raw),
        attention_sinks=True,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )
    return with_bases_of_layers(config, raw)


def granite_windows(plain: ModelConfig, raw: RawConfig) -> tuple[int | None, ...]:
    """Windows of Granite Swash, by default in three of four layers, from the second one on."""
    window = sliding_window(raw, 128)
    if raw.get("layer_types") is not None:
        return layer_windows(raw, plain.num_layers, window)
    return tuple(window if layer % 4 else None for layer in range(plain.num_layers))


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
