"""OLMo and EXAONE 4: no norms before attention and MLP, but norms after them (OLMo 2 and 3, EXAONE 4).

OLMo 1 is Llama whose layer norms have no weights. OLMo 2 norms all queries of a token together, and all its keys;
EXAONE 4 norms each head. OLMo 3 and EXAONE 4 32B have windows in three of four layers: OLMo 3 scales the rotary
positions of the others only, EXAONE 4 has none there.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, number, optional_number
from engine.models.families.layer_kinds import rope_and_window_rope, windows_but_every
from engine.models.model_config import ModelConfig, sliding_window
from engine.models.tensor_names import TensorNames

_BEHIND = TensorNames(attn_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")


def olmo(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """OLMo 1 and 1.7 in the format of transformers."""
    bias = flag(raw, "attention_bias", default=False)
    return replace(
        plain,
        norm="layer",
        norm_weight=False,
        norm_eps=1e-5,
        clip_qkv=optional_number(raw, "clip_qkv"),
        qkv_bias=bias,
        o_bias=bias,
    )


def _behind(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    eps = number(raw, "rms_norm_eps", default=1e-5)
    return replace(plain, tensors=_BEHIND, block="behind", norm_eps=eps, qk_norm=True)


def olmo2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    bias = flag(raw, "attention_bias", default=False)
    return replace(_behind(plain, raw), qk_norm_of="all", qkv_bias=bias, o_bias=bias)


def olmo3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    rope, window_rope = rope_and_window_rope(plain, raw, 500_000.0)
    return replace(
        olmo2(plain, raw),
        rope=rope,
        window_rope=window_rope,
        windows=windows_but_every(4, plain, raw, sliding_window(raw, 4096)),
    )


def exaone4(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """EXAONE 4 32B, and 1.2B, which has no windows and rotary positions in all layers."""
    windows = _exaone_windows(plain, raw)
    has_windows = sliding_window(raw, 4096) is not None
    return replace(
        _behind(plain, raw),
        windows=windows,
        unrotated=tuple(n for n, window in enumerate(windows) if window is None) if has_windows else (),
    )


def _exaone_windows(plain: ModelConfig, raw: RawConfig) -> tuple[int | None, ...]:
    """Without `layer_types`, a pattern says which layers have a window: a number, or letters as in LLLG."""
    window = sliding_window(raw, 4096)
    pattern = raw.get("sliding_window_pattern")
    if window is None:
        return plain.windows
    if raw.get("layer_types") is None and isinstance(pattern, str) and pattern:
        last = plain.num_layers - 1
        return tuple(window if pattern[n % len(pattern)] == "L" and n < last else None for n in range(last + 1))
    every = 4 if isinstance(pattern, str) else integer(raw, "sliding_window_pattern", default=4)
    return windows_but_every(every, plain, raw, window)
