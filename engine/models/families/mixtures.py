"""Mixtures of experts, with the attention of other families."""

from dataclasses import replace

from engine.models.families.llama import llama, qwen2, qwen3, qwen_windows
from engine.models.model_config import ExpertsConfig, ModelConfig, RawConfig, TensorNames, integer, refuse

_MIXTRAL = TensorNames(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}",
    expert_up=("w1", "w3"),
    expert_down="w2",
)
_DEEPSEEK = TensorNames(shared_expert="mlp.shared_experts")


def mixtral(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Mixtral: Mistral with experts in all layers."""
    experts = ExpertsConfig(
        num_experts=integer(raw, "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        intermediate_size=plain.intermediate_size,
        normalised=True,
        layers=(True,) * plain.num_layers,
    )
    windows = (raw.get("sliding_window"),) * plain.num_layers
    return replace(plain, tensors=_MIXTRAL, windows=windows, experts=experts)


def qwen2_moe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Qwen 1.5 MoE and 2 MoE, with a gated shared expert that processes every token."""
    shared = integer(raw, "shared_expert_intermediate_size")
    experts = replace(_qwen_experts(plain, raw), shared_size=shared, shared_gate=True)
    bias = bool(raw.get("qkv_bias", True))
    return replace(qwen2(plain, raw), qkv_bias=bias, windows=_qwen2_moe_windows(plain, raw), experts=experts)


def _qwen2_moe_windows(plain: ModelConfig, raw: RawConfig) -> tuple[int | None, ...]:
    """As `qwen_windows`, but without `layer_types` these are every second layer before `max_window_layers`."""
    if not raw.get("use_sliding_window", False) or raw.get("layer_types") is not None:
        return qwen_windows(plain, raw)
    window, end = raw.get("sliding_window", 4096), raw.get("max_window_layers", 28)
    return tuple(window if layer % 2 == 0 and layer < end else None for layer in range(plain.num_layers))


def qwen3_moe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Qwen 3 MoE, with the same window in all layers, or none."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    windows = (window,) * plain.num_layers
    return replace(qwen3(plain, raw), windows=windows, experts=_qwen_experts(plain, raw))


def deepseek(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """DeepSeek-MoE 16B: MLPs in the first layers, experts and shared experts in the others.

    Later DeepSeek models, which compress KV, are not supported.
    """
    refuse(raw, scoring_func="sigmoid")
    inner, first = integer(raw, "moe_intermediate_size"), raw.get("first_k_dense_replace", 0)
    step = raw.get("moe_layer_freq", 1)
    experts = ExpertsConfig(
        num_experts=integer(raw, "n_routed_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        intermediate_size=inner,
        normalised=bool(raw.get("norm_topk_prob", False)),
        layers=tuple(layer >= first and layer % step == 0 for layer in range(plain.num_layers)),
        shared_size=(raw.get("n_shared_experts") or 0) * inner,
    )
    return replace(llama(plain, raw), tensors=_DEEPSEEK, experts=experts)


def _qwen_experts(plain: ModelConfig, raw: RawConfig) -> ExpertsConfig:
    step, without = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    return ExpertsConfig(
        num_experts=integer(raw, "num_experts", "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        intermediate_size=integer(raw, "moe_intermediate_size"),
        normalised=bool(raw.get("norm_topk_prob", False)),
        layers=tuple((layer + 1) % step == 0 and layer not in without for layer in range(plain.num_layers)),
    )
