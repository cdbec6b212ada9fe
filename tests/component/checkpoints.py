"""Small random checkpoints in Hugging Face format, with a byte-level tokenizer, one for each shape of model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

from tests.component.mtp import add_mtp_layer
from tests.component.newest_families import LLAMA4, MIXED, MIXTURES
from tests.component.remote_families import REMOTE_FAMILIES, RENAMED, save_remote

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # which takes seconds to import

# To transformers it is a part of multimodal models only.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

VOCAB_SIZE = 264
BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID = 256, 257, 258
WINDOW = 12
TRAINED_POSITIONS = 32

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": PAD_TOKEN_ID,
}
_LLAMA_SIZES = {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 512}


def _model(model_type: str, **facts: Any) -> PreTrainedModel:
    """transformers' own class for a `model_type`; `facts` in its config's words."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_SIZES | facts))


def llama_like(model_type: str, **facts: Any) -> PreTrainedModel:
    """A model with the sizes of these tests, in its config's words."""
    return _model(model_type, **_LLAMA_SIZES | facts)


def _llama_rope(rope_type: str, max_positions: int = 512, **parameters: Any) -> PreTrainedModel:
    rope = {"rope_type": rope_type, "rope_theta": 10_000.0, "factor": 4.0} | parameters
    return llama_like("llama", rope_parameters=rope, max_position_embeddings=max_positions)


_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED_POSITIONS}


def latent_attention(model_type: str, **facts: Any) -> PreTrainedModel:
    """A model whose heads share a latent of 48, in heads of 16 + 32 for queries and of 48 for values."""
    sizes = {
        "kv_lora_rank": 48,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 48,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": TRAINED_POSITIONS,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 4 * TRAINED_POSITIONS,
    }
    return llama_like(model_type, **sizes | facts)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama_like("llama", num_key_value_heads=4),
    "llama-tied": lambda: llama_like("llama", tie_word_embeddings=True),
    "llama-biases": lambda: llama_like("llama", attention_bias=True, mlp_bias=True),
    "llama-multi-query": lambda: llama_like("llama", num_key_value_heads=1),
    "llama-linear": lambda: _llama_rope("linear"),
    "llama-dynamic": lambda: _llama_rope("dynamic", TRAINED_POSITIONS),
    "llama-yarn": lambda: _llama_rope("yarn", 128, original_max_position_embeddings=32),
    "llama-llama3": lambda: _llama_rope(
        "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "mistral": lambda: llama_like("mistral", sliding_window=WINDOW, head_dim=16),
    "qwen2": lambda: llama_like("qwen2", tie_word_embeddings=True),
    "qwen2-window": lambda: llama_like("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": lambda: llama_like("qwen3", head_dim=32),
}
"""The plain decoder in its variants; the CPU runs them in every way it has."""

_SIGMOID_EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

OTHER_FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: _model("gpt2"),
    "gpt-bigcode": lambda: _model("gpt_bigcode"),
    "gpt-bigcode-multi-head": lambda: _model("gpt_bigcode", multi_query=False),
    "starcoder2": lambda: llama_like("starcoder2", sliding_window=WINDOW),
    "gptj": lambda: _model("gptj", rotary_dim=8, n_positions=512),
    "gpt-neo": lambda: _model(
        "gpt_neo", num_layers=3, attention_types=[[["global", "local"], 1], [["local"], 1]], window_size=WINDOW
    ),
    "codegen": lambda: _model("codegen", hidden_size=128, num_attention_heads=8, rotary_dim=8, n_positions=512),
    "gpt-neox": lambda: _model("gpt_neox", intermediate_size=96, max_position_embeddings=512),
    "gpt-neox-sequential": lambda: _model(
        "gpt_neox", intermediate_size=96, use_parallel_residual=False, attention_bias=False, rotary_pct=1.0
    ),
    "opt": lambda: _model("opt", ffn_dim=96, max_position_embeddings=512),
    "opt-350m": lambda: _model(
        "opt", ffn_dim=96, max_position_embeddings=512, do_layer_norm_before=False, word_embed_proj_dim=48
    ),
    "opt-no-final-norm": lambda: _model(
        "opt", ffn_dim=96, max_position_embeddings=512, _remove_final_layer_norm=True, tie_word_embeddings=False
    ),
    "bloom": lambda: _model("bloom"),
    "bloom-6-heads": lambda: _model("bloom", hidden_size=96, num_attention_heads=6),
    "mpt": lambda: _model("mpt", attn_config={"clip_qkv": 0.7, "softmax_scale": 0.3}, max_seq_len=512),
    "mpt-6-heads": lambda: _model("mpt", hidden_size=96, num_attention_heads=6),
    "falcon-7b": lambda: _model("falcon"),
    "falcon-40b": lambda: _model("falcon", new_decoder_architecture=True, num_kv_heads=2),
    "falcon-11b": lambda: _model(
        "falcon", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, ffn_hidden_size=96
    ),
    "falcon-rw": lambda: _model("falcon", alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "phi": lambda: llama_like("phi"),
    "phi3": lambda: llama_like("phi3", sliding_window=WINDOW, rope_parameters={"partial_rotary_factor": 0.5}),
    "phi3-longrope": lambda: llama_like(
        "phi3",
        original_max_position_embeddings=TRAINED_POSITIONS,
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [1.0 + i for i in range(8)],
        },
    ),
    "gemma": lambda: llama_like("gemma", head_dim=32),
    "gemma2": lambda: llama_like("gemma2", head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=20),
    "vault-gemma": lambda: llama_like("vaultgemma", head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=20),
    "gemma3": lambda: llama_like(
        "gemma3_text", num_hidden_layers=4, head_dim=32, sliding_window=WINDOW, sliding_window_pattern=2
    ),
    "gemma-biases": lambda: llama_like("gemma", head_dim=32, attention_bias=True),
    "gemma2-biases": lambda: llama_like(
        "gemma2", head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=20, attention_bias=True
    ),
    "gemma3-biases": lambda: llama_like(
        "gemma3_text",
        head_dim=32,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        attention_bias=True,
        attn_logit_softcapping=5.0,  # Gemma 2's, which Gemma 3 does not apply
    ),
    "glm": lambda: llama_like("glm", head_dim=16),
    "glm4": lambda: llama_like("glm4", head_dim=16, attention_bias=True),
    "granite": lambda: llama_like(
        "granite", embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=2.0
    ),
    "granite-swa": lambda: llama_like(
        "granite_swa",
        num_hidden_layers=5,
        sliding_window=WINDOW,
        layer_rope_theta=[0, 10_000.0, 10_000.0, 0, 500_000.0],
        attention_bias=True,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        logits_scaling=2.0,
    ),
    "hyperclovax": lambda: llama_like(
        "hyperclovax", embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=2.0
    ),
    "hyperclovax-no-norms": lambda: llama_like("hyperclovax", use_post_norm=False, residual_multiplier=0.7),
    "stablelm": lambda: llama_like("stablelm", use_qkv_bias=True),
    "deepseek-v2": lambda: latent_attention("deepseek_v2", q_lora_rank=None, topk_method="group_limited_greedy"),
    "deepseek-v3": lambda: latent_attention("deepseek_v3", q_lora_rank=32),
    "glm4-moe-lite": lambda: latent_attention("glm4_moe_lite", q_lora_rank=None, rope_interleave=False),
    "youtu": lambda: latent_attention("youtu", q_lora_rank=32, pad_token_id=None),  # its row is lost in transformers
    "minicpm3": lambda: latent_attention(
        "minicpm3",
        q_lora_rank=32,
        scale_emb=3,
        dim_model_base=32,
        original_max_position_embeddings=TRAINED_POSITIONS,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [1.0 + i for i in range(8)],
        },
    ),
    "stablelm-12b": lambda: llama_like("stablelm", use_parallel_residual=True, qk_layernorm=True),
    "mixtral": lambda: llama_like("mixtral", num_local_experts=4, sliding_window=WINDOW),
    "qwen2-moe": lambda: llama_like(
        "qwen2_moe", num_experts=8, moe_intermediate_size=32, shared_expert_intermediate_size=48, mlp_only_layers=[1]
    ),
    "qwen3-moe": lambda: llama_like("qwen3_moe", num_experts=8, moe_intermediate_size=32, norm_topk_prob=True),
    "gpt-oss": lambda: llama_like(
        "gpt_oss",
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=3,
        intermediate_size=64,
        sliding_window=WINDOW,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
        max_position_embeddings=128,
    ),
    "smollm3": lambda: llama_like("smollm3", use_sliding_window=True, sliding_window=WINDOW, no_rope_layer_interval=2),
    "olmo": lambda: llama_like("olmo", clip_qkv=0.7, attention_bias=True),
    "olmo2": lambda: llama_like("olmo2", attention_bias=True),
    "olmo3": lambda: llama_like(
        "olmo3", sliding_window=WINDOW, layer_types=_ALTERNATING, rope_scaling=_YARN, max_position_embeddings=128
    ),
    "cohere": lambda: llama_like("cohere", use_qk_norm=True, attention_bias=True, logit_scale=0.5),
    "cohere2": lambda: llama_like("cohere2", sliding_window=WINDOW, layer_types=_ALTERNATING, logit_scale=0.5),
    "cwm": lambda: llama_like("cwm", head_dim=32, num_hidden_layers=5, sliding_window=WINDOW),
    "ministral": lambda: llama_like("ministral", head_dim=32, sliding_window=WINDOW, layer_types=_ALTERNATING),
    "bitnet": lambda: llama_like("bitnet", attention_bias=True),
    "seed-oss": lambda: llama_like("seed_oss", head_dim=32, attention_out_bias=True, mlp_bias=True),
    "ernie4-5": lambda: llama_like("ernie4_5", head_dim=32, use_bias=True),
    "exaone4": lambda: llama_like("exaone4", sliding_window=WINDOW, layer_types=_ALTERNATING),
    "hunyuan": lambda: llama_like(
        "hunyuan_v1_dense",
        head_dim=32,
        attention_bias=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 50.0},
    ),
    "ministral3": lambda: llama_like(
        "ministral3",
        head_dim=32,
        sliding_window=WINDOW,
        max_position_embeddings=128,
        rope_parameters={**_YARN, "factor": 16.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 8}
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
    ),
    "arcee": lambda: llama_like("arcee", attention_bias=True, mlp_bias=True),
    "nemotron": lambda: llama_like("nemotron", attention_bias=True, mlp_bias=True),
    "jais2": lambda: llama_like("jais2"),
    "nanochat": lambda: llama_like("nanochat"),
    "apertus": lambda: llama_like("apertus", attention_bias=True),
    "helium": lambda: llama_like("helium", head_dim=16, attention_bias=True, mlp_bias=True),
    "glm4-moe": lambda: llama_like(
        "glm4_moe", **_SIGMOID_EXPERTS, head_dim=32, use_qk_norm=True, attention_bias=True, partial_rotary_factor=0.5
    ),
    "dots1": lambda: llama_like("dots1", **_SIGMOID_EXPERTS, sliding_window=WINDOW, max_window_layers=1),
    "minimax-m2": lambda: llama_like(
        "minimax_m2", num_local_experts=8, num_experts_per_tok=3, intermediate_size=32, head_dim=32, rotary_dim=16
    ),
    "ernie4-5-moe": lambda: llama_like(
        "ernie4_5_moe", moe_num_experts=8, moe_k=3, moe_intermediate_size=32, tie_word_embeddings=False
    ),
    "granite-moe": lambda: llama_like(
        "granitemoeshared",
        num_local_experts=8,
        num_experts_per_tok=3,
        intermediate_size=32,
        shared_intermediate_size=64,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        logits_scaling=2.0,
    ),
    "granite-4-attention": lambda: llama_like(
        "granitemoehybrid",
        layer_types=["attention"] * 3,
        num_local_experts=0,
        shared_intermediate_size=96,
        position_embedding_type="rope",
        attention_multiplier=0.2,
    ),
    "olmoe": lambda: llama_like("olmoe", num_experts=8, num_experts_per_tok=3, intermediate_size=32),
    "flex-olmo": lambda: llama_like("flex_olmo", num_experts=8, num_experts_per_tok=3, intermediate_size=32),
    "hunyuan-moe": lambda: llama_like(
        "hunyuan_v1_moe",
        num_experts=8,
        moe_topk=3,
        intermediate_size=32,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 100.0},
        head_dim=16,
    ),
    "phimoe": lambda: llama_like(
        "phimoe",
        num_local_experts=8,
        intermediate_size=32,
        attention_bias=True,
        lm_head_bias=True,
        router_jitter_noise=0.2,
        sliding_window=WINDOW,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [1.0 + i / 8 for i in range(8)],  # transformers has lost the switch to these
            "short_mscale": 1.25,
            "long_mscale": 1.25,
            "original_max_position_embeddings": TRAINED_POSITIONS,
        },
    ),
    "llama4": partial(llama_like, **LLAMA4),
    **{family: partial(llama_like, **facts) for family, facts in MIXTURES.items()},
    **{family: remote.reference for family, remote in REMOTE_FAMILIES.items()},
}
"""One for each shape of all others."""

_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
_DELTA_EXPERTS = _DELTA | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}

_FALCON_H1 = {
    "num_hidden_layers": 2,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
    "mlp_multipliers": [0.9, 0.6],
}

_JAMBA = {"num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8}

RECURRENT_FAMILIES: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: llama_like(
        "lfm2",
        num_hidden_layers=5,
        layer_types=["conv", "full_attention", "conv", "full_attention", "conv"],
        conv_bias=True,
        block_multiple_of=32,
    ),
    "lfm2-moe": lambda: llama_like(
        "lfm2_moe",
        layer_types=["conv", "full_attention", "conv"],
        conv_bias=True,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        num_dense_layers=1,
        routed_scaling_factor=1.5,
    ),
    "lfm3": lambda: llama_like(
        "lfm3",
        num_hidden_layers=5,
        layer_types=["conv", "sliding_attention", "full_attention", "conv", "sliding_attention"],
        head_dim=32,
        sliding_window=WINDOW,
        conv_bias=True,
    ),
    "lfm3-plain": lambda: llama_like(
        "lfm3",
        layer_types=["conv", "full_attention", "conv"],
        head_dim=16,
        use_sandwich_norm=False,
        use_attention_gate=False,
        attention_bias=True,
    ),
    "granite-4": lambda: llama_like(
        "granitemoehybrid",
        layer_types=["mamba", "attention", "mamba"],
        mamba_expand=1,
        mamba_n_heads=8,
        mamba_d_state=24,
        mamba_proj_bias=True,
        num_local_experts=8,
        num_experts_per_tok=3,
        intermediate_size=32,
        shared_intermediate_size=48,
        attention_bias=True,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        logits_scaling=2.0,
    ),
    "granite-4-dense": lambda: llama_like(
        "granitemoehybrid",
        layer_types=["mamba", "attention", "mamba"],
        mamba_expand=1,
        mamba_n_heads=4,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_conv_bias=False,
        num_local_experts=0,
        shared_intermediate_size=96,
        position_embedding_type="rope",
        tie_word_embeddings=True,
    ),
    "nemotron-h": lambda: llama_like(
        "nemotron_h",
        hybrid_override_pattern="-M*EM",
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
        head_dim=32,
        use_bias=True,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=48,
        routed_scaling_factor=1.5,
    ),
    "falcon-h1": lambda: llama_like("falcon_h1", **_FALCON_H1),
    "falcon-h1-norm": lambda: llama_like("falcon_h1", mamba_rms_norm=True, **_FALCON_H1),
    "falcon-h1-34b": lambda: llama_like("falcon_h1", mamba_rms_norm=True, mamba_norm_before_gate=False, **_FALCON_H1),
    "bamba": lambda: llama_like(
        "bamba", attn_layer_indices=[1], mamba_expand=1, mamba_n_heads=4, mamba_d_state=16, mlp_bias=True
    ),
    "mamba2": lambda: _model("mamba2", num_heads=8, head_dim=16, n_groups=2, state_size=16, use_bias=True),
    "mamba": lambda: _model("mamba", use_bias=True, time_step_rank=6, state_size=8),
    "falcon-mamba": lambda: _model("falcon_mamba", use_conv_bias=False, mixer_rms_eps=1e-3),
    "jamba": lambda: llama_like("jamba", mamba_proj_bias=True, num_experts=4, mamba_dt_rank=6, **_JAMBA),
    "jamba-dense": lambda: llama_like("jamba", mamba_conv_bias=False, num_experts=1, num_key_value_heads=1, **_JAMBA),
    "qwen3.5": lambda: llama_like("qwen3_5_text", attention_bias=True, **_DELTA),
    "qwen3.5-moe": lambda: llama_like("qwen3_5_moe_text", **_DELTA_EXPERTS | {"num_experts": 4}),
    "qwen3-next": lambda: llama_like("qwen3_next", mlp_only_layers=[1], **_DELTA_EXPERTS),
}
"""Those with recurrent layers, which ranks and graphs do not know."""

MIXED_FAMILIES = {family: partial(llama_like, **facts) for family, facts in MIXED.items()}
"""Those whose layers differ in their sizes, or read the KV of earlier ones, which ranks do not know."""
EAGER_MIXED = ("gemma3n",)
COMPILED_MIXED = tuple(family for family in MIXED_FAMILIES if family not in EAGER_MIXED)


def families_by_layers(*without: str) -> list[Any]:
    """Parameters of tests that try layers in another place, on ranks or a GPU's stand-in: families of the same layers
    under other names are for long runs.
    """
    return [
        pytest.param(family, marks=pytest.mark.soak) if family in RENAMED else family
        for family in (*FAMILIES, *OTHER_FAMILIES)
        if family not in without
    ]


def build_checkpoint(family: str, model_dir: Path, *, max_shard_size: str = "1GB", seed: int = 0) -> Path:
    """Save a random model of `family` (a key of any table) with a tokenizer; returns `model_dir`. With "-mtp" behind
    the family it has a layer of multi-token prediction.

    Weights are larger than a fresh model's, so that its predictions are peaked and a wrong detail shows.
    """
    torch.manual_seed(seed)
    family, has_mtp = family.removesuffix("-mtp"), family.endswith("-mtp")
    model = (FAMILIES | OTHER_FAMILIES | RECURRENT_FAMILIES | MIXED_FAMILIES)[family]()
    randomise(model)
    if family in REMOTE_FAMILIES:
        save_remote(family, model, model_dir)
    else:
        model.tie_weights()
        model.save_pretrained(model_dir, max_shard_size=max_shard_size)
    if has_mtp:
        add_mtp_layer(model_dir, randomise)
    save_tokenizer(model_dir)
    return model_dir


@torch.no_grad()
def randomise(model: Any) -> None:
    """Draw the weights of a model."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            is_from_one = name.endswith("weight") and not parameter.any()  # norms of 1 + weight
            parameter.copy_((0.0 if is_from_one else 1.0) + 0.2 * torch.randn_like(parameter))
            if type(model).__name__.startswith(("Gemma3n", "Gemma4")) and "q_norm" in name:
                parameter *= 0.25  # its scores are not scaled: attention to one token alone would amplify rounding
        elif name.endswith(("router.scale", "per_expert_scale")):  # choices that rounding does not change
            parameter.copy_((8.0 if name.endswith("router.scale") else 1.0) * (1.0 + 0.2 * torch.randn_like(parameter)))
        else:
            # gpt-oss clamps gates and ups at 7. A delta rule of large weights amplifies rounding, also transformers'.
            large = type(model).__name__ == "GptOssForCausalLM" and name.endswith(("sinks", "gate_up_proj"))
            usual = 0.08 if "linear_attn" in name else 0.15
            if name.endswith("modality_router.weight"):
                usual *= parameter.shape[1]  # its inputs are divided by this
            parameter.normal_(0.0, 0.3 if name.endswith("bias") else 0.5 if large else usual)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.normal_(0.0, 0.3)
        elif name.endswith("layer_scalar"):
            buffer.uniform_(0.6, 1.2)


def save_tokenizer(model_dir: Path) -> None:
    """A tokenizer whose ids 0 to 255 are bytes, in the order of GPT-2's byte alphabet, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    tokenizer.save(str(model_dir / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": template,
    }
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings))
