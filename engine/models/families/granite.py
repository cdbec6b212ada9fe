"""Granite 3 and its kin: factors of embeddings, scores, sublayers and logits.

Granite Swash has windows, sinks and layers without rotary positions. HyperCLOVA X norms what attention and MLP compute.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, layer_windows, number, numbers
from engine.models.model_config import ModelConfig, sliding_window
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


def with_bases_of_layers(config: ModelConfig, raw: RawConfig) -> ModelConfig:
    """The model with the bases of rotary positions that `layer_rope_theta` lists, 0 for layers without any. Of others
    there may be two, if one is that of all layers with a window.
    """
    bases = numbers(raw, "layer_rope_theta", may_be_zero=True)
    if not bases:
        return config
    if len(bases) != config.num_layers:
        raise ConfigurationError(f"layer_rope_theta has {len(bases)} entries for {config.num_layers} layers")
    kinds: dict[bool, set[float]] = {False: set(), True: set()}
    for base, window in zip(bases, config.windows, strict=True):
        kinds[window is not None] |= {base} - {0.0}
    all_layers, (full, windowed) = kinds[False] | kinds[True], kinds.values()
    config = replace(config, unrotated=tuple(layer for layer, base in enumerate(bases) if not base))
    if len(all_layers) <= 1:
        return replace(config, rope=replace(config.rope, theta=(*all_layers, config.rope.theta)[0]))
    if len(full) > 1 or len(windowed) > 1:
        raise ConfigurationError(
            "config.json: layer_rope_theta is not supported with other bases than one for layers with a window and one "
            "for the others"
        )
    ropes = [replace(config.rope, theta=(*bases_of_kind, config.rope.theta)[0]) for bases_of_kind in (full, windowed)]
    return replace(config, rope=ropes[0], window_rope=ropes[1])


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
