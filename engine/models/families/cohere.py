"""Cohere's Command models: attention and MLP side by side on one layer norm without bias, neighbours rotated together.

Command R7B and Command A have windows in three of four layers, and no rotary positions in the others. Command A+ has
experts.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, number, refuse, text
from engine.models.experts_config import ExpertsConfig
from engine.models.families.layer_kinds import default_rope, windows_but_every
from engine.models.families.mixtures import expert_layers
from engine.models.model_config import ModelConfig, sliding_window
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_COHERE = TensorNames(interleaved_rotary=True)


def cohere(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Command R, R+ and Aya. In R+ each head of queries and keys has a layer norm of its own. The context length of the
    first release is in `model_max_length`.
    """
    bias = flag(raw, "attention_bias", default=False)
    return replace(
        plain,
        tensors=_COHERE,
        block="parallel-shared",
        norm="layer",
        norm_eps=number(raw, "layer_norm_eps", default=1e-5),
        qk_norm=flag(raw, "use_qk_norm", default=False),
        qk_norm_of="own",
        max_position_embeddings=integer(raw, "model_max_length", default=plain.max_position_embeddings),
        rope=default_rope(plain, raw, 500_000.0),
        logit_scale=number(raw, "logit_scale", default=0.0625),
        qkv_bias=bias,
        o_bias=bias,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )


def cohere2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Command R7B, Command A, and Aya Vision's text model."""
    refuse(raw, use_qk_norm=True, use_parallel_block=False, use_gated_activation=False)
    pattern = integer(raw, "sliding_window_pattern", "_sliding_window_pattern", default=4)
    windows = windows_but_every(pattern, plain, raw, sliding_window(raw, 4096))
    return replace(
        cohere(plain, raw),
        qk_norm_of="head",
        max_position_embeddings=plain.max_position_embeddings,
        rope=plain.rope,
        windows=windows,
        unrotated=tuple(layer for layer, window in enumerate(windows) if window is None),
    )


_COHERE_MOE = replace(_COHERE, shared_expert="mlp.shared_experts")


def cohere2_moe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Command A+: Command A with experts behind some dense layers. Its norms may be root-mean-square ones."""
    num_dense = integer(raw, "first_k_dense_replace", default=0, least=0)
    prefix = integer(raw, "prefix_dense_sliding_window_pattern", default=1)
    if raw.get("layer_types") is None:
        raw = {**raw, "layer_types": _kinds_of_layers(plain, raw, num_dense, prefix)}
    has_rms = raw.get("rms_norm_eps") is not None
    config, experts = cohere2(plain, raw), _cohere_experts(plain, raw, num_dense)
    # Dense layers are rotated without a window, too, unless only some of them have none.
    are_rotated = [prefix == 1 and not is_sparse for is_sparse in experts.layers]
    return replace(
        config,
        tensors=_COHERE_MOE,
        norm="rms" if has_rms else "layer",
        norm_eps=plain.norm_eps if has_rms else config.norm_eps,
        intermediate_size=integer(raw, "prefix_dense_intermediate_size", default=plain.intermediate_size),
        unrotated=tuple(layer for layer in config.unrotated if not are_rotated[layer]),
        experts=experts if any(experts.layers) else None,
    )


def _kinds_of_layers(plain: ModelConfig, raw: RawConfig, num_dense: int, prefix: int) -> list[str]:
    pattern = integer(raw, "sliding_window_pattern", default=4)
    counts = [(prefix, num_dense), (pattern, plain.num_layers - num_dense)]
    numbered = ((every, layer + 1) for every, count in counts for layer in range(count))
    return ["sliding_attention" if number % every else "full_attention" for every, number in numbered]


def _cohere_experts(plain: ModelConfig, raw: RawConfig, num_dense: int) -> ExpertsConfig:
    """Experts whose results and that of the shared one are added, or their mean taken."""
    scoring = text(raw, "expert_selection_fn", default="softmax")
    if scoring not in ("softmax", "sigmoid"):
        raise ConfigurationError(f"config.json: expert_selection_fn {scoring!r:.100} is not supported")
    joining = text(raw, "shared_expert_combination_strategy", default="average")
    if joining not in ("average", "sum"):
        raise ConfigurationError(f"config.json: shared_expert_combination_strategy {joining!r:.100} is not supported")
    shared = integer(raw, "num_shared_experts", default=0, least=0) * plain.intermediate_size
    scale = 0.5 if shared and joining == "average" else 1.0
    return ExpertsConfig(
        num_experts=integer(raw, "num_experts", default=8),
        top_k=integer(raw, "num_experts_per_tok", default=2),
        intermediate_size=plain.intermediate_size,
        normalised=scoring == "softmax" or flag(raw, "norm_topk_prob", default=True),
        layers=expert_layers(plain, raw, num_dense),
        shared_size=shared,
        scoring=scoring,
        routed_scale=scale,
        shared_scale=scale,
    )
