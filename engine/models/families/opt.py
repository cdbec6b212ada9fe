"""OPT: GPT-2's architecture with ReLU; the first two rows of its position table are unused."""

from dataclasses import replace

from engine.models.model_config import ModelConfig, RawConfig, TensorNames, refuse
from mesh.domain.errors import ConfigurationError

_TENSORS = TensorNames(
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{}",
    input_norm="self_attn_layer_norm",
    o="self_attn.out_proj",
    post_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
    first_position=2,
)


def opt(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """OPT, except 350M, which norms after each addition and has an embedding narrower than its layers."""
    refuse(raw, do_layer_norm_before=False, _remove_final_layer_norm=True, layer_norm_elementwise_affine=False)
    if raw.get("word_embed_proj_dim", plain.hidden_size) != plain.hidden_size:
        raise ConfigurationError("config.json: word_embed_proj_dim other than hidden_size is not supported")
    bias = bool(raw.get("enable_bias", True))
    return replace(
        plain,
        tensors=_TENSORS,
        norm="layer",
        norm_bias=True,
        norm_eps=1e-5,
        positions="learned",
        activation=str(raw.get("activation_function", "relu")),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=bool(raw.get("tie_word_embeddings", True)),
    )
