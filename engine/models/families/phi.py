"""Phi: Phi 1 and 2 have GPT-J's layers with biases; Phi 3 and 4 are Llama with fused projections."""

from dataclasses import replace

from checkpoint.config_json import RawConfig, refuse, rope_section
from engine.models.model_config import ModelConfig, parse_rope, rotated_dim, sliding_window
from engine.models.tensor_names import TensorNames

_PHI = TensorNames(
    final_norm="model.final_layernorm",
    o="self_attn.dense",
    up=("mlp.fc1",),
    down="mlp.fc2",
)
_TRAINED = "original_max_position_embeddings"
_PHI3 = TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))


def phi(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Phi 1, 1.5 and 2, with half of each head rotated, and biases everywhere."""
    refuse(raw, qk_layernorm=True)
    return replace(
        plain,
        tensors=_PHI,
        norm="layer",
        norm_bias=True,
        block="parallel-shared",
        rope=replace(plain.rope, dim=rotated_dim(raw, plain.head_dim, default=0.5)),
        activation=str(raw.get("hidden_act", "gelu_new")),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        lm_head_bias=True,
    )


def phi3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Phi 3, 3.5 and 4, with one window for all layers, or none."""
    is_said = any(stated.get(_TRAINED) is not None for stated in (raw, rope_section(raw)))
    trained = raw if is_said else {**raw, _TRAINED: 4096}
    return replace(
        plain,
        tensors=_PHI3,
        rope=parse_rope(trained, plain.max_position_embeddings, rotated_dim(raw, plain.head_dim)),
        windows=(sliding_window(raw),) * plain.num_layers,
    )
