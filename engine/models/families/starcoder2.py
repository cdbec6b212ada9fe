"""StarCoder 2: Llama's attention with layer norms, a plain MLP, and biases everywhere."""

from dataclasses import replace

from engine.models.facts import ModelConfig, RawConfig
from engine.models.tensor_names import TensorNames

_TENSORS = TensorNames(up=("mlp.c_fc",), down="mlp.c_proj")


def starcoder2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    bias = bool(raw.get("use_bias", True))
    return replace(
        plain,
        tensors=_TENSORS,
        norm="layer",
        norm_bias=True,
        windows=(raw.get("sliding_window"),) * plain.num_layers,
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=bool(raw.get("tie_word_embeddings", True)),
    )
