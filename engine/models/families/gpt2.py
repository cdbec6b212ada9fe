"""GPT-2 and its relatives: learned positions, layer norms, a plain MLP, biases everywhere."""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, refuse, texts
from engine.models.model_config import ModelConfig
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_TENSORS = TensorNames(
    embed="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}",
    input_norm="ln_1",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    post_norm="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
)


def _plain_gpt(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    return replace(
        plain,
        tensors=_TENSORS,
        norm="layer",
        norm_bias=True,
        positions="learned",
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )


def gpt2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """GPT-2, whose matrices are stored as [inputs, outputs]."""
    refuse(raw, scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False, add_cross_attention=True)
    return replace(_plain_gpt(plain, raw), tensors=replace(_TENSORS, transposed=True))


def gpt_bigcode(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """StarCoder and SantaCoder: all query heads share one head of keys and values."""
    refuse(raw, scale_attn_weights=False, add_cross_attention=True)
    multi_query = flag(raw, "multi_query", default=True)
    return replace(
        _plain_gpt(plain, raw),
        tensors=replace(_TENSORS, grouped_qkv=not multi_query),
        num_kv_heads=1 if multi_query else plain.num_heads,
    )


_GPT_NEO = replace(
    _TENSORS,
    qkv=tuple(f"attn.attention.{name}_proj" for name in "qkv"),
    o="attn.attention.out_proj",
)


def gpt_neo(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """GPT-Neo, TinyStories: windows in every second layer, and scores without a scale."""
    window = integer(raw, "window_size", default=256)
    kinds = texts(raw, "attention_layers") or _repeated_kinds(plain, raw)
    if other := sorted(set(kinds) - {"global", "local"}):
        raise ConfigurationError(f"config.json: attention_types may name global and local, not {other[0]!r:.100}")
    return replace(
        _plain_gpt(plain, raw),
        tensors=_GPT_NEO,
        qkv_bias=False,
        attention_scale=1.0,
        windows=tuple(window if kind == "local" else None for kind in kinds),
    )


def _repeated_kinds(plain: ModelConfig, raw: RawConfig) -> tuple[str, ...]:
    """The kind of each layer's attention, stated as patterns that repeat."""
    stated = raw.get("attention_types")
    if stated is None:
        return (("global", "local") * plain.num_layers)[: plain.num_layers]
    try:
        num_stated = sum(len(pattern) * count for pattern, count in stated)
        if num_stated == plain.num_layers:
            return tuple(str(kind) for pattern, count in stated for kind in pattern * count)
    except (TypeError, ValueError):
        raise ConfigurationError(
            "config.json: attention_types must be a list of patterns and how often each is repeated"
        ) from None
    raise ConfigurationError(f"config.json: attention_types names {num_stated} layers of {plain.num_layers}")
