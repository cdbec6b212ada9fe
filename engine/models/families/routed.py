"""Mixtures of experts with the attention of other families, by the way in which they choose experts.

GLM-4.5, dots.llm1, Solar Open and MiniMax M2 choose by sigmoids and a bias, as DeepSeek V3 does; ERNIE 4.5 by a softmax
and a bias; Phi 3.5 MoE by SparseMixer; the others by a softmax.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, integers, layer_windows, number, refuse, rope_section
from engine.models.experts_config import ExpertsConfig
from engine.models.families.dense import ernie4_5, hunyuan
from engine.models.families.layer_kinds import default_rope
from engine.models.families.llama import qwen3
from engine.models.families.mixtures import DEEPSEEK, MIXTRAL, sigmoid_experts, softmax_experts
from engine.models.families.olmo import olmo2
from engine.models.model_config import ModelConfig, rotated_dim, sliding_window
from mesh.domain.errors import ConfigurationError


def glm4_moe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """GLM-4.5, 4.5 Air, 4.6 and 4.7."""
    raw = {"first_k_dense_replace": 1, "n_shared_experts": 1, **raw}
    return replace(
        plain,
        tensors=DEEPSEEK,
        rope=replace(plain.rope, dim=rotated_dim(raw, plain.head_dim, default=0.5)),
        qk_norm=flag(raw, "use_qk_norm", default=False),
        qkv_bias=flag(raw, "attention_bias", default=False),
        experts=sigmoid_experts(plain, raw),
    )


def solar_open(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Solar Open 100B: GLM-4.5 with experts in all layers."""
    plain = replace(plain, rope=default_rope(plain, raw, 1_000_000.0))
    raw = {"partial_rotary_factor": 1.0, **raw, "first_k_dense_replace": 0, "use_qk_norm": False}
    return glm4_moe(plain, raw)


def dots1(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """dots.llm1: Qwen 3's attention."""
    window, first = sliding_window(raw, 4096), integer(raw, "max_window_layers", default=62, least=0)
    windows = layer_windows(raw, plain.num_layers, window)
    if raw.get("layer_types") is None:
        windows = tuple(window if layer >= first else None for layer in range(plain.num_layers))
    raw = {"norm_topk_prob": False, **raw}
    experts = sigmoid_experts(plain, raw)
    return replace(qwen3(plain, {**raw, "sliding_window": None}), tensors=DEEPSEEK, windows=windows, experts=experts)


def minimax_m2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """MiniMax M2 and M2.1: all queries of a token are normed together, and all its keys."""
    refuse(raw, use_qk_norm=False, use_routing_bias=False, scoring_func="softmax")
    if raw.get("shared_intermediate_size") or 0 in integers(raw, "attn_type_list"):
        raise ConfigurationError(
            "config.json: MiniMax M2 with shared experts or with linear attention is not supported"
        )
    rotated = integer(raw, "rotary_dim", default=plain.head_dim) / plain.head_dim
    rope = default_rope(plain, raw, 5_000_000.0)
    experts = replace(
        softmax_experts(plain, raw, normalised=True), scoring="sigmoid", choice_bias=True, wide_router=True
    )
    return replace(
        plain,
        tensors=replace(MIXTRAL, choice_bias="block_sparse_moe.e_score_correction_bias"),
        rope=replace(rope, dim=rotated_dim(raw, plain.head_dim, default=rotated)),
        qk_norm=True,
        qk_norm_of="all",
        experts=experts,
    )


_NO_SUM = 1e-9
"""Far below what shares of chosen experts add up to: a limit of their sum up to this changes nothing."""


def ernie4_5_moe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """ERNIE 4.5 21B-A3B and 300B-A47B."""
    refuse(raw, use_bias=True)
    if (least := number(raw, "moe_norm_min", default=1e-12, may_be_zero=True)) > _NO_SUM:
        raise ConfigurationError(f"config.json: moe_norm_min {least:g} is not supported, only up to {_NO_SUM:g}")
    inner, step = integer(raw, "moe_intermediate_size"), integer(raw, "moe_layer_interval", default=1)
    first, last = integer(raw, "moe_layer_start_index", default=1, least=0), plain.num_layers - 1
    if raw.get("moe_layer_end_index") not in (None, -1):
        last = integer(raw, "moe_layer_end_index", least=0)
    experts = ExpertsConfig(
        num_experts=integer(raw, "moe_num_experts"),
        top_k=integer(raw, "moe_k"),
        intermediate_size=inner,
        normalised=True,
        layers=tuple((layer + 1) % step == 0 and first <= layer <= last for layer in range(plain.num_layers)),
        shared_size=integer(raw, "moe_num_shared_experts", default=2, least=0) * inner,
        choice_bias=True,
        wide_router=True,
    )
    dense = ernie4_5(plain, raw)
    tensors = replace(
        dense.tensors,
        shared_expert="mlp.shared_experts",
        choice_bias="mlp.moe_statics.e_score_correction_bias",
        choice_bias_is_row=True,
    )
    return replace(dense, tensors=tensors, experts=experts)


def olmoe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """OLMoE: all queries of a token are normed together, and all its keys."""
    if raw.get("clip_qkv") is not None:
        raise ConfigurationError("config.json: clip_qkv is not supported: OLMoE limits queries after they are normed")
    experts = softmax_experts(plain, raw, normalised=flag(raw, "norm_topk_prob", default=False))
    bias = flag(raw, "attention_bias", default=False)
    return replace(plain, qk_norm=True, qk_norm_of="all", qkv_bias=bias, o_bias=bias, experts=experts)


def flex_olmo(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """FlexOlmo: OLMo 2 with experts."""
    experts = softmax_experts(plain, raw, normalised=flag(raw, "norm_topk_prob", default=False))
    return replace(olmo2(plain, raw), rope=default_rope(plain, raw, 500_000.0), experts=experts)


def hunyuan_moe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Hunyuan A13B. Its lists have a number for each layer."""
    refuse(raw, use_mixed_mlp_moe=False)
    for key, width in (("num_shared_expert", 1), ("moe_intermediate_size", plain.intermediate_size)):
        if (given := _same_in_layers(raw, key, width)) != width:
            raise ConfigurationError(f"config.json: {key} {given} is not supported, only {width} is")
    raw = {**raw, **{key: _same_in_layers(raw, key, 1) for key in ("num_experts", "moe_topk")}}
    experts = softmax_experts(plain, raw, normalised=True)
    dense = hunyuan(plain, raw)
    return replace(
        dense,
        tensors=replace(dense.tensors, router="mlp.gate.wg", shared_expert="mlp.shared_mlp"),
        experts=replace(experts, shared_size=plain.intermediate_size, wide_router=True),
    )


def _same_in_layers(raw: RawConfig, key: str, default: int) -> int:
    """A number, or a list of numbers that are all equal."""
    if not isinstance(raw.get(key), list):
        return integer(raw, key, default=default)
    different = sorted(set(integers(raw, key)))
    if len(different) != 1:
        raise ConfigurationError(f"config.json: {key} must be the same in all layers, got {different!r:.100}")
    return different[0]


def phimoe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Phi 3.5 MoE and Phi mini and tiny MoE: layer norms, biases, LongRoPE with factors of its own."""
    scaling, rope = rope_section(raw), default_rope(plain, raw, 1_000_000.0)
    if rope.kind == "longrope":
        short, long = (number(scaling, key, default=1.0) for key in ("short_mscale", "long_mscale"))
        if short != long:
            raise ConfigurationError(f"config.json: short_mscale {short} and long_mscale {long} must be equal")
        rope = replace(rope, attention_factor=short)
    if integer(raw, "num_experts_per_tok", default=2) != 2:
        raise ConfigurationError("config.json: num_experts_per_tok must be 2 for Phi's SparseMixer")
    bias = flag(raw, "attention_bias", default=False)
    return replace(
        plain,
        tensors=MIXTRAL,
        rope=rope,
        windows=(sliding_window(raw),) * plain.num_layers,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        lm_head_bias=flag(raw, "lm_head_bias", default=False),
        experts=replace(
            softmax_experts(plain, {"num_experts_per_tok": 2, **raw}, normalised=False),
            scoring="sparse-mixer",
            mixer_range=2 * number(raw, "router_jitter_noise", default=0.01, may_be_zero=True),
        ),
    )
