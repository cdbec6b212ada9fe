"""Gemma: norms that add 1 to their weights, a scaled embedding, GELU. Gemma 2 adds windows, soft caps and norms."""

from dataclasses import replace

from engine.models.model_config import ModelConfig, RawConfig, TensorNames, first_of, layer_windows, parse_rope

_GEMMA = TensorNames(norm_offset=1.0)
_GEMMA2 = replace(
    _GEMMA,
    attn_out_norm="post_attention_layernorm",
    post_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)


def gemma(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Gemma 1. Early checkpoints name the activation `gelu`, but use the tanh approximation."""
    bias = bool(raw.get("attention_bias", False))
    return replace(
        plain,
        tensors=_GEMMA,
        embed_scale=plain.hidden_size**0.5,
        activation="gelu_pytorch_tanh",
        qkv_bias=bias,
        o_bias=bias,
        tied=bool(raw.get("tie_word_embeddings", True)),
    )


def gemma2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Gemma 2: layers with and without a window alternate, beginning with a window."""
    return replace(
        gemma(plain, raw),
        tensors=_GEMMA2,
        block="sandwich",
        windows=_every(2, plain, raw),
        attention_scale=float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        attention_softcap=raw.get("attn_logit_softcapping"),
        logit_softcap=raw.get("final_logit_softcapping"),
    )


def gemma3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Gemma 3, text only: norms of queries and keys; layers with a window have separate rotary frequencies."""
    sizes = (plain.max_position_embeddings, plain.head_dim)
    ropes = raw.get("rope_parameters") or {}
    full: RawConfig = {"rope_theta": 1_000_000.0, **raw}
    local: RawConfig = {"rope_theta": raw.get("rope_local_base_freq")}
    if "full_attention" in ropes:
        full, local = ({"rope_parameters": ropes[kind]} for kind in ("full_attention", "sliding_attention"))
    return replace(
        gemma2(plain, raw),
        qk_norm=True,
        counts_scaled_positions=True,
        rope=parse_rope(full, *sizes),
        window_rope=parse_rope(local, *sizes),
        windows=_every(first_of(raw, ("sliding_window_pattern", "_sliding_window_pattern"), 6), plain, raw),
    )


def _every(pattern: int, plain: ModelConfig, raw: RawConfig) -> tuple[int | None, ...]:
    """Windows of all layers but every `pattern`-th one. Newer config.json files list them in `layer_types`."""
    window = raw.get("sliding_window", 4096)
    if raw.get("layer_types") is not None:
        return layer_windows(raw, plain.num_layers, window)
    return tuple(window if (layer + 1) % pattern else None for layer in range(plain.num_layers))
