"""OPT: GPT-2's architecture with ReLU; the first two rows of its position table are unused.

OPT 350M norms the residual after each addition, has no final norm, and an embedding narrower than its layers.
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, refuse
from engine.models.model_config import ModelConfig
from engine.models.tensor_names import TensorNames

_TENSORS = TensorNames(
    embed="model.decoder.embed_tokens",
    project_in="model.decoder.project_in",
    project_out="model.decoder.project_out",
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
    refuse(raw, layer_norm_elementwise_affine=False)
    norms_before = flag(raw, "do_layer_norm_before", default=True)
    embed_size = integer(raw, "word_embed_proj_dim", default=plain.hidden_size)
    bias = flag(raw, "enable_bias", default=True)
    return replace(
        plain,
        tensors=_TENSORS,
        block="sequential" if norms_before else "post",
        embed_size=None if embed_size == plain.hidden_size else embed_size,
        final_norm=norms_before and not flag(raw, "_remove_final_layer_norm", default=False),
        norm="layer",
        norm_bias=True,
        norm_eps=1e-5,
        positions="learned",
        activation=str(raw.get("activation_function", "relu")),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )
