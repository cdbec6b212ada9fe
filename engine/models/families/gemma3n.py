"""Gemma 3n: Gemma 4 E2B's layers with heads of one size, several residuals (engine/models/streams.py), and MLPs whose
gates are mostly 0 in the first layers.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, integers, numbers, optional_number, refuse
from engine.models.families.gemma import rope_and_local_rope
from engine.models.families.gemma4 import kv_sources
from engine.models.families.layer_kinds import windows_but_every
from engine.models.model_config import ModelConfig, sliding_window
from engine.models.per_layer_config import LayerSizes, PerLayerConfig
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_NAMES = TensorNames(
    attn_out_norm="post_attention_layernorm",
    post_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
_NUM_SPARSE, _SPARSITY = 10, 0.95


def gemma3n(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """E2B and E4B, text only."""
    refuse(raw, attention_bias=True, altup_correct_scale=False, use_bidirectional_attention=True)
    if integer(raw, "altup_active_idx", default=0, least=0):
        raise ConfigurationError("config.json: altup_active_idx must be 0: layers change the first residual")
    windows = windows_but_every(5, plain, raw, sliding_window(raw, 512))
    rope, window_rope = rope_and_local_rope(plain, raw)
    kv_heads, head_dim = integer(raw, "num_key_value_heads", default=2), integer(raw, "head_dim", default=256)
    sources = kv_sources(windows, plain.num_layers - integer(raw, "num_kv_shared_layers", default=15, least=0))
    return replace(
        plain,
        tensors=_NAMES,
        block="sandwich",
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        activation=plain.activation if raw.get("hidden_activation") else "gelu_pytorch_tanh",
        embed_scale=plain.hidden_size**0.5,
        attention_scale=1.0,
        # null turns the cap off
        logit_softcap=optional_number({"final_logit_softcapping": 30.0, **raw}, "final_logit_softcapping"),
        tied=flag(raw, "tie_word_embeddings", default=True),
        windows=windows,
        counts_scaled_positions=True,
        rope=rope,
        window_rope=window_rope,
        per_layer=PerLayerConfig(
            layers=tuple(
                LayerSizes(head_dim, kv_heads, inner, source)
                for inner, source in zip(_inner_sizes(plain, raw), sources, strict=True)
            ),
            input_width=integer(raw, "hidden_size_per_layer_input", default=256),
            input_vocab=integer(raw, "vocab_size_per_layer_input", default=262_144),
            num_streams=integer(raw, "altup_num_inputs", default=4, least=2),
            laurel_rank=integer(raw, "laurel_rank", default=64),
            sparsity=_sparsity(plain, raw),
        ),
    )


def _inner_sizes(plain: ModelConfig, raw: RawConfig) -> tuple[int, ...]:
    """The width of each layer's MLP."""
    if not isinstance(raw.get("intermediate_size"), list):
        return (plain.intermediate_size,) * plain.num_layers
    widths = integers(raw, "intermediate_size")
    if len(widths) != plain.num_layers:
        raise ConfigurationError(
            f"config.json: intermediate_size has {len(widths)} entries for {plain.num_layers} layers"
        )
    return widths


def _sparsity(plain: ModelConfig, raw: RawConfig) -> tuple[float, ...]:
    """The share of each layer's gates that are 0."""
    name, num_layers = "activation_sparsity_pattern", plain.num_layers
    if raw.get(name) is None:
        num_sparse = _NUM_SPARSE if num_layers > _NUM_SPARSE else 0
        return (_SPARSITY,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    shares = numbers(raw, name, may_be_zero=True)
    if len(shares) != num_layers or max(shares) >= 1:
        raise ConfigurationError(f"config.json: {name} must have {num_layers} numbers below 1")
    return shares
