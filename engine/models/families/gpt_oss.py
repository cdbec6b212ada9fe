"""gpt-oss: attention with sinks and alternating windows, and experts with biases in every layer.

A tensor has a matrix of all experts, [experts, inputs, outputs], another the biases, [experts, outputs], under its name
and `_bias`. Gates and ups alternate in them.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, first_of, flag, integer, layer_windows, number, rope_section
from engine.kernels.cpu.arguments import SWIGLU_ALPHA, SWIGLU_LIMIT
from engine.models.experts_config import ExpertsConfig
from engine.models.model_config import ModelConfig, parse_rope, sliding_window
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_GPT_OSS = TensorNames(
    router="mlp.router",
    expert="mlp.experts",
    expert_up=("gate_up_proj",),
    expert_down="down_proj",
    stacked_experts=True,
)
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """gpt-oss. Without `layer_types`, layers with a window and without alternate."""
    for name, needed in (("swiglu_limit", SWIGLU_LIMIT), ("swiglu_alpha", SWIGLU_ALPHA)):
        if (found := number(raw, name, default=needed)) != needed:
            raise ConfigurationError(f"config.json: {name} {found:g} is not supported, only {needed:g}")
    if plain.activation != "silu":
        raise ConfigurationError(f"config.json: hidden_act {plain.activation} is not supported for gpt-oss, only silu")
    # The released config.json states no dtype; as in transformers, without a rope it is that of the released models.
    rope = raw if rope_section(raw) else {**raw, "rope_parameters": _ROPE}
    has_bias = flag(raw, "attention_bias", default=True)
    return replace(
        plain,
        tensors=_GPT_OSS,
        rope=parse_rope({"rope_theta": 150_000.0, **rope}, plain.max_position_embeddings, plain.head_dim),
        dtype=plain.dtype if first_of(raw, ("dtype", "torch_dtype")) else "bfloat16",
        windows=_windows(plain, raw),
        attention_sinks=True,
        activation="clamped_swiglu",
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=True,
        experts=ExpertsConfig(
            num_experts=integer(raw, "num_local_experts", "num_experts"),
            top_k=integer(raw, "num_experts_per_tok", "experts_per_token", default=4),
            intermediate_size=plain.intermediate_size,
            normalised=True,  # the softmax over the chosen ones
            layers=(True,) * plain.num_layers,
            router_bias=True,
        ),
    )


def _windows(plain: ModelConfig, raw: RawConfig) -> tuple[int | None, ...]:
    window = sliding_window(raw, 128)
    if raw.get("layer_types") is None:
        return tuple(window if layer % 2 == 0 else None for layer in range(plain.num_layers))
    return layer_windows(raw, plain.num_layers, window)
