"""Gemma: norms that add 1 to their weights, a scaled embedding, GELU. Gemma 2 adds windows, soft caps and norms."""

from dataclasses import replace

from checkpoint.config_json import (
    RawConfig,
    first_of,
    flag,
    integer,
    number,
    optional_number,
    refuse,
    rope_section,
    section,
)
from engine.models.families.layer_kinds import windows_but_every
from engine.models.model_config import ModelConfig, RopeConfig, parse_rope, sliding_window
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_GEMMA = TensorNames(norm_offset=1.0)
_GEMMA2 = replace(
    _GEMMA,
    attn_out_norm="post_attention_layernorm",
    post_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def gemma(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Gemma 1. Early checkpoints name the activation `gelu`, but use the tanh approximation."""
    refuse(raw, use_bidirectional_attention=True)  # EmbeddingGemma's, which generates nothing
    bias, named = flag(raw, "attention_bias", default=False), first_of(raw, ("hidden_activation", "hidden_act"), "gelu")
    return replace(
        plain,
        tensors=_GEMMA,
        embed_scale=plain.hidden_size**0.5,
        activation="gelu_pytorch_tanh" if named == "gelu" else plain.activation,
        qkv_bias=bias,
        o_bias=bias,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )


def gemma2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Gemma 2: layers with and without a window alternate, beginning with a window. `hidden_act`, which files have,
    too, means nothing.
    """
    return replace(
        gemma(plain, raw),
        activation=plain.activation if raw.get("hidden_activation") else "gelu_pytorch_tanh",
        tensors=_GEMMA2,
        block="sandwich",
        windows=windows_but_every(2, plain, raw, sliding_window(raw, 4096)),
        attention_scale=number(raw, "query_pre_attn_scalar", default=256) ** -0.5,
        # null turns a cap off
        attention_softcap=optional_number({"attn_logit_softcapping": 50.0, **raw}, "attn_logit_softcapping"),
        logit_softcap=optional_number({"final_logit_softcapping": 30.0, **raw}, "final_logit_softcapping"),
    )


def vault_gemma(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """VaultGemma 1B: Gemma 2 without the norms after attention and MLP."""
    return replace(
        gemma2(plain, raw), tensors=replace(_GEMMA, post_norm="pre_feedforward_layernorm"), block="sequential"
    )


def gemma3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Gemma 3, text only: norms of queries and keys; layers with a window have separate rotary frequencies."""
    rope, window_rope = rope_and_local_rope(plain, raw)
    pattern = integer(raw, "sliding_window_pattern", "_sliding_window_pattern", default=6)
    return replace(
        gemma2(plain, raw),
        attention_softcap=None,  # config.json may have Gemma 2's, which transformers does not apply either
        logit_softcap=optional_number(raw, "final_logit_softcapping"),
        qk_norm=True,
        counts_scaled_positions=True,
        rope=rope,
        window_rope=window_rope,
        windows=windows_but_every(pattern, plain, raw, sliding_window(raw, 4096)),
    )


def rope_and_local_rope(plain: ModelConfig, raw: RawConfig) -> tuple[RopeConfig, RopeConfig]:
    """Rotary positions of layers without and with a window."""
    sizes = (plain.max_position_embeddings, plain.head_dim)
    ropes = rope_section(raw)
    full: RawConfig = {"rope_theta": 1_000_000.0, **raw}
    local: RawConfig = {"rope_theta": number(raw, "rope_local_base_freq", default=10_000.0)}
    if "full_attention" in ropes:
        full, local = ({"rope_parameters": section(ropes, kind)} for kind in ("full_attention", "sliding_attention"))
        if not full["rope_parameters"] or not local["rope_parameters"]:
            raise ConfigurationError("config.json: rope_parameters needs full_attention and sliding_attention")
    return parse_rope(full, *sizes), parse_rope(local, *sizes)
