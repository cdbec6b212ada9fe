"""LFM2 of Liquid AI: short convolutions in most layers, attention with norms of queries and keys in the others.

LFM3 has windows and gates, too. LFM2 MoE has experts in all layers but the first ones, chosen by sigmoids and a bias.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, first_of, flag, integer, integers, number, refuse, rope_section, texts
from engine.models.experts_config import ExpertsConfig
from engine.models.families.layer_kinds import recurrent_layers, rope_and_window_rope
from engine.models.model_config import ModelConfig, sliding_window
from engine.models.recurrent.config import RecurrentConfig
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_LFM2 = TensorNames(
    final_norm="model.embedding_norm",
    input_norm="operator_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="self_attn.out_proj",
    recurrent="conv",
    post_norm="ffn_norm",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)
_THETA = 1_000_000.0
_LFM3_KINDS = ("sliding_attention", "conv", "full_attention", "conv")
_LFM3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": _THETA, "partial_rotary_factor": 0.5},
}


def lfm2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """LFM2 350M to 2.6B. Its oldest config.json files have keys of their own."""
    return replace(
        plain,
        tensors=_LFM2,
        intermediate_size=_inner_size(raw),
        qk_norm=True,
        norm_eps=number(raw, "norm_eps", "block_norm_eps", default=1e-5),
        rope=plain.rope if _has_theta(raw) else replace(plain.rope, theta=_THETA),
        tied=flag(raw, "tie_word_embeddings", default=flag(raw, "tie_embedding", default=True)),
        recurrent=RecurrentConfig(
            kind="conv",
            layers=_conv_layers(plain, raw),
            kernel=integer(raw, "conv_L_cache", default=3, least=2),
            channels=plain.hidden_size,
            bias=(bias := flag(raw, "conv_bias", default=False)),
            conv_bias=bias,
        ),
    )


_LFM3 = replace(
    _LFM2,
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    o="self_attn.o_proj",
    attention_gate="self_attn.gate_proj",
    gates_heads=True,
    attn_out_norm="post_operator_norm",
    mlp_out_norm="post_ffn_norm",
)


def lfm3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """LFM3: LFM2 with gates and norms of results, and layers of attention with windows and rotary positions of their
    own.
    """
    kinds = texts(raw, "layer_types") or ("conv", *(_LFM3_KINDS[layer % 4] for layer in range(1, plain.num_layers)))
    window, has_gate = sliding_window(raw, 256), flag(raw, "use_attention_gate", default=True)
    if has_gate:
        refuse(raw, attention_bias=True)  # the gates would have none
    bias = flag(raw, "attention_bias", default=False)
    stated = raw if rope_section(raw) else {**raw, "rope_parameters": _LFM3_ROPE}
    rope, window_rope = rope_and_window_rope(plain, stated, _THETA)
    defaults = {"conv_L_cache": 7, "block_auto_adjust_ff_dim": False}
    return replace(
        lfm2(plain, {**defaults, **raw, "layer_types": list(kinds)}),
        tensors=_LFM3 if has_gate else replace(_LFM3, attention_gate=""),
        block="sandwich" if flag(raw, "use_sandwich_norm", default=True) else "sequential",
        rope=rope,
        window_rope=window_rope,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        attention_gate=has_gate,
        qkv_bias=bias,
        o_bias=bias,
    )


def lfm2_moe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """LFM2 8B-A1B and 24B-A2B."""
    dense = integer(raw, "num_dense_layers", default=2, least=0)
    tensors = replace(
        _LFM2,
        router="feed_forward.gate",
        expert="feed_forward.experts.{}",
        expert_up=("w1", "w3"),
        expert_down="w2",
        stacked_up="feed_forward.experts.gate_up_proj",
        stacked_down="feed_forward.experts.down_proj",
        choice_bias="feed_forward.expert_bias",
    )
    return replace(
        lfm2(plain, {"block_auto_adjust_ff_dim": False, **raw}),
        tensors=tensors,
        experts=ExpertsConfig(
            num_experts=integer(raw, "num_experts", default=32),
            top_k=integer(raw, "num_experts_per_tok", default=4),
            intermediate_size=integer(raw, "moe_intermediate_size", default=1792),
            normalised=flag(raw, "norm_topk_prob", default=True),
            layers=tuple(layer >= dense for layer in range(plain.num_layers)),
            scoring="sigmoid",
            choice_bias=flag(raw, "use_expert_bias", default=True),
            routed_scale=number(raw, "routed_scaling_factor", default=1.0),
            share_floor=1e-6,
        ),
    )


def _has_theta(raw: RawConfig) -> bool:
    """True if config.json states the base of rotary positions."""
    return first_of(raw, ("rope_theta",)) is not None or rope_section(raw).get("rope_theta") is not None


def _conv_layers(plain: ModelConfig, raw: RawConfig) -> tuple[bool, ...]:
    if raw.get("layer_types") is not None:
        return recurrent_layers(texts(raw, "layer_types"), "conv", ("full_attention", "sliding_attention"))
    if raw.get("full_attn_idxs") is None:
        raise ConfigurationError("config.json of LFM2 needs layer_types or full_attn_idxs")
    attention = integers(raw, "full_attn_idxs")
    return tuple(layer not in attention for layer in range(plain.num_layers))


def _inner_size(raw: RawConfig) -> int:
    """Width of the MLP. config.json may state it before it is reduced to two thirds, in multiples of a unit."""
    width = integer(raw, "block_ff_dim", "intermediate_size")
    if not flag(raw, "block_auto_adjust_ff_dim", default=True):
        return width
    width = int(2 * width / 3)
    if "block_ffn_dim_multiplier" in raw and raw["block_ffn_dim_multiplier"] is None:
        return width
    unit = integer(raw, "block_multiple_of", default=256)
    return unit * -(-int(number(raw, "block_ffn_dim_multiplier", default=1.0) * width) // unit)
