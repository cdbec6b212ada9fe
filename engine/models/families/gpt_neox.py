"""GPT-NeoX, Pythia, GPT-J and CodeGen: attention and MLP work in parallel, and a part of each head is rotated."""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, number
from engine.models.model_config import ModelConfig, parse_rope, rotated_dim
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_TENSORS = TensorNames(
    embed="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    lm_head="embed_out",
    layer="gpt_neox.layers.{}",
    qkv=("attention.query_key_value",),
    o="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    grouped_qkv=True,
)


def gpt_neox(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """GPT-NeoX 20B, Pythia, Dolly 2, and RedPajama-INCITE (with sequential layers)."""
    bias = flag(raw, "attention_bias", default=True)
    return replace(
        plain,
        tensors=_TENSORS,
        norm="layer",
        norm_bias=True,
        block="parallel" if flag(raw, "use_parallel_residual", default=True) else "sequential",
        rope=parse_rope(
            {"rope_theta": number(raw, "rotary_emb_base", default=10_000.0), **raw},
            plain.max_position_embeddings,
            rotated_dim(raw, plain.head_dim, default=0.25),
        ),
        activation=str(raw.get("hidden_act", "gelu")),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
    )


_GPTJ = TensorNames(
    embed="transformer.wte",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}",
    input_norm="ln_1",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    o="attn.out_proj",
    up=("mlp.fc_in",),
    down="mlp.fc_out",
    interleaved_rotary=True,
)


def gptj(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """GPT-J 6B, with biases in the MLP and the output matrix only."""
    return replace(
        plain,
        tensors=_GPTJ,
        norm="layer",
        norm_bias=True,
        block="parallel-shared",
        rope=replace(plain.rope, dim=integer({"rotary_dim": 64, **raw}, "rotary_dim", default=plain.head_dim)),
        gated=False,
        mlp_bias=True,
        lm_head_bias=True,
    )


_CODEGEN_PARTS = 4
"""As many as the cores that it was trained on."""


def codegen(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """CodeGen 350M to 16B: GPT-J with one projection."""
    if plain.num_heads % _CODEGEN_PARTS:
        raise ConfigurationError(f"config.json: CodeGen's heads are in {_CODEGEN_PARTS} parts, not {plain.num_heads}")
    return replace(gptj(plain, raw), tensors=replace(_GPTJ, qkv=("attn.qkv_proj",), qkv_parts=_CODEGEN_PARTS))
