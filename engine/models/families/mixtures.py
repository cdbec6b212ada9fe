"""Mixtures of experts, with the attention of other families."""

from dataclasses import replace

from checkpoint.config_json import (
    RawConfig,
    flag,
    integer,
    integers,
    layer_windows,
    number,
    refuse,
    rope_section,
    section,
    texts,
)
from engine.models.experts_config import ExpertsConfig
from engine.models.families.granite import granite, granite_windows, with_bases_of_layers
from engine.models.families.layer_kinds import rope_and_window_rope
from engine.models.families.llama import llama, qwen2, qwen3, qwen_windows
from engine.models.model_config import ModelConfig, sliding_window
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

MIXTRAL = TensorNames(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}",
    expert_up=("w1", "w3"),
    expert_down="w2",
)
DEEPSEEK = TensorNames(shared_expert="mlp.shared_experts")


def mixtral(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Mixtral: Mistral with experts in all layers."""
    experts = ExpertsConfig(
        num_experts=integer(raw, "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        intermediate_size=plain.intermediate_size,
        normalised=True,
        layers=(True,) * plain.num_layers,
    )
    windows = (sliding_window(raw),) * plain.num_layers
    return replace(plain, tensors=MIXTRAL, windows=windows, experts=experts)


def qwen2_moe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Qwen 1.5 MoE and 2 MoE, with a gated shared expert that processes every token."""
    shared = integer(raw, "shared_expert_intermediate_size")
    experts = replace(qwen_experts(plain, raw), shared_size=shared, shared_gate=True)
    bias = flag(raw, "qkv_bias", default=True)
    return replace(qwen2(plain, raw), qkv_bias=bias, windows=_qwen2_moe_windows(plain, raw), experts=experts)


def _qwen2_moe_windows(plain: ModelConfig, raw: RawConfig) -> tuple[int | None, ...]:
    """As `qwen_windows`, but without `layer_types` these are every second layer before `max_window_layers`."""
    if not flag(raw, "use_sliding_window", default=False) or raw.get("layer_types") is not None:
        return qwen_windows(plain, raw)
    window, end = sliding_window(raw, 4096), integer(raw, "max_window_layers", default=28, least=0)
    return tuple(window if layer % 2 == 0 and layer < end else None for layer in range(plain.num_layers))


def qwen3_moe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Qwen 3 MoE, with the same window in all layers, or none."""
    window = sliding_window(raw, 4096) if flag(raw, "use_sliding_window", default=False) else None
    windows = (window,) * plain.num_layers
    return replace(qwen3(plain, raw), windows=windows, experts=qwen_experts(plain, raw))


def qwen3_vl_moe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """The text part of Qwen 3 VL MoE: Qwen 3 MoE, whatever `norm_topk_prob` says, with experts in stacks."""
    config = qwen3_moe(plain, {**raw, "norm_topk_prob": True})
    return replace(config, tensors=TensorNames(stacked_transposed=True))


def deepseek(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """DeepSeek-MoE 16B: MLPs in the first layers, experts and shared experts in the others."""
    refuse(raw, scoring_func="sigmoid")
    inner, step = integer(raw, "moe_intermediate_size"), integer(raw, "moe_layer_freq", default=1)
    first = integer(raw, "first_k_dense_replace", default=0, least=0)
    experts = ExpertsConfig(
        num_experts=integer(raw, "n_routed_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        intermediate_size=inner,
        normalised=flag(raw, "norm_topk_prob", default=False),
        layers=tuple(layer >= first and layer % step == 0 for layer in range(plain.num_layers)),
        shared_size=integer(raw, "n_shared_experts", default=0, least=0) * inner,
    )
    return replace(llama(plain, raw), tensors=DEEPSEEK, experts=experts)


def qwen_experts(plain: ModelConfig, raw: RawConfig) -> ExpertsConfig:
    step, without = integer(raw, "decoder_sparse_step", default=1), integers(raw, "mlp_only_layers")
    return ExpertsConfig(
        num_experts=integer(raw, "num_experts", "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        intermediate_size=integer(raw, "moe_intermediate_size"),
        normalised=flag(raw, "norm_topk_prob", default=False),
        layers=tuple((layer + 1) % step == 0 and layer not in without for layer in range(plain.num_layers)),
    )


def sigmoid_experts(plain: ModelConfig, raw: RawConfig) -> ExpertsConfig:
    """Experts as DeepSeek V3 has them, in its words."""
    refuse(raw, scoring_func="softmax")
    inner, step = integer(raw, "moe_intermediate_size"), integer(raw, "moe_layer_freq", default=1)
    first = integer(raw, "first_k_dense_replace", default=0, least=0)
    return ExpertsConfig(
        num_experts=integer(raw, "n_routed_experts", "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        intermediate_size=inner,
        normalised=flag(raw, "norm_topk_prob", default=True),
        layers=tuple(layer >= first and layer % step == 0 for layer in range(plain.num_layers)),
        shared_size=integer(raw, "n_shared_experts", default=0, least=0) * inner,
        scoring="sigmoid",
        choice_bias=True,
        num_groups=integer(raw, "n_group", default=1),
        top_groups=integer(raw, "topk_group", default=1),
        routed_scale=number(raw, "routed_scaling_factor", default=1.0),
        wide_router=True,
    )


def expert_layers(plain: ModelConfig, raw: RawConfig, num_dense: int) -> tuple[bool, ...]:
    """The layers that `mlp_layer_types` calls sparse; without it all behind the first `num_dense`."""
    if raw.get("mlp_layer_types") is None:
        return tuple(layer >= num_dense for layer in range(plain.num_layers))
    types = texts(raw, "mlp_layer_types")
    if other := sorted(set(types) - {"dense", "sparse"}):
        raise ConfigurationError(f"config.json: mlp_layer_types may name dense and sparse, not {other[0]!r:.100}")
    if len(types) != plain.num_layers:
        raise ConfigurationError(f"mlp_layer_types has {len(types)} entries for {plain.num_layers} layers")
    return tuple(kind == "sparse" for kind in types)


def softmax_experts(plain: ModelConfig, raw: RawConfig, *, normalised: bool) -> ExpertsConfig:
    """Experts in all layers, as wide as `intermediate_size` says."""
    return ExpertsConfig(
        num_experts=integer(raw, "num_local_experts", "num_experts"),
        top_k=integer(raw, "num_experts_per_tok", "moe_topk"),
        intermediate_size=plain.intermediate_size,
        normalised=normalised,
        layers=(True,) * plain.num_layers,
    )


_GRANITE = TensorNames(
    router="block_sparse_moe.router.layer",
    expert="block_sparse_moe.experts.{}",
    expert_up=("input_linear",),
    expert_down="output_linear",
    stacked_up="block_sparse_moe.input_linear.weight",
    stacked_down="block_sparse_moe.output_linear.weight",
    shared_expert="shared_mlp",
)


def granite_moe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Granite 3 MoE, and 3.1 with a shared expert."""
    experts = softmax_experts(plain, raw, normalised=True)
    shared = integer(raw, "shared_intermediate_size", default=0, least=0)
    return replace(granite(plain, raw), tensors=_GRANITE, experts=replace(experts, shared_size=shared))


_SWASH = replace(
    _GRANITE,
    router="block_sparse_moe.router",
    stacked_up="block_sparse_moe.experts.gate_up_proj",
    stacked_down="block_sparse_moe.experts.down_proj",
)


def granite_moe_swa(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Granite Swash with experts."""
    windows = granite_windows(plain, raw)
    config = replace(granite_moe(plain, raw), tensors=_SWASH, windows=windows, attention_sinks=True)
    return with_bases_of_layers(config, raw)


_MELLUM_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def mellum(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Mellum 2: Qwen 3 MoE with other rotary positions in layers with a window."""
    stored = rope_section(raw) or _MELLUM_ROPE
    for kind in _MELLUM_ROPE:
        if (part := number(section(stored, kind), "partial_rotary_factor", default=1.0)) != 1:
            raise ConfigurationError(f"config.json: partial_rotary_factor {part:g} of {kind} is not supported, only 1")
    rope, window_rope = rope_and_window_rope(plain, {**raw, "rope_parameters": stored}, 10_000.0)
    windows = plain.windows
    if raw.get("layer_types") is not None:
        windows = layer_windows(raw, plain.num_layers, sliding_window(raw, 1024))
    raw = {"norm_topk_prob": True, **raw, "decoder_sparse_step": 1, "mlp_only_layers": []}
    experts = replace(qwen_experts(plain, raw), layers=expert_layers(plain, raw, 0))
    return replace(
        qwen3(plain, {**raw, "use_sliding_window": False}),
        rope=rope,
        window_rope=window_rope,
        windows=windows,
        experts=experts if any(experts.layers) else None,
    )
