"""GPT-J: neighbouring rotary dimensions are paired; attention and MLP run in parallel and share one norm."""

from dataclasses import replace

from engine.models.facts import ModelConfig, RawConfig
from engine.models.tensor_names import TensorNames

_TENSORS = TensorNames(
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
        tensors=_TENSORS,
        norm="layer",
        norm_bias=True,
        block="parallel-shared",
        rope=replace(plain.rope, dim=raw.get("rotary_dim") or plain.head_dim),
        gated=False,
        mlp_bias=True,
        lm_head_bias=True,
    )
