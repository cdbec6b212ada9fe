"""config.json with a member of another type: it is read, or refused by the member's name, but never a traceback."""

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoint.model_facts import read_model_facts
from checkpoint.rope_override import RopeOverride
from engine.models.read_config import load_config
from mesh.domain.errors import ConfigurationError

WRONG: tuple[Any, ...] = ("x", [], {}, -1, None, 0, 1.5, True, [None], {"x": []})

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
LLAMA = SIZES | {"rms_norm_eps": 1e-6, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True}
WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "attention_factor": 1.5}
YARN = {"factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0, "truncate": False}
LOW_HIGH = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": LLAMA | {"mlp_bias": False, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LOW_HIGH}},
    "MistralForCausalLM": LLAMA | {"sliding_window": 16, "rope_parameters": {"rope_type": "yarn", **YARN}},
    "MixtralForCausalLM": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen2ForCausalLM": LLAMA | WINDOWS | {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "Qwen2MoeForCausalLM": LLAMA
    | WINDOWS
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2, "mlp_only_layers": [1], "qkv_bias": True},
    "GptOssForCausalLM": LLAMA
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    }
    | {"layer_types": ["full_attention", "sliding_attention"] * 2, "rope_scaling": {"rope_type": "yarn", **YARN}},
    "Gemma3ForCausalLM": LLAMA
    | {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50, "final_logit_softcapping": None}
    | {"sliding_window": 16, "sliding_window_pattern": 2, "rope_local_base_freq": 1e4}
    | {"rope_parameters": {kind: {"rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}},
    "NemotronHForCausalLM": LLAMA
    | {"layers_block_type": ["mamba", "attention", "mlp", "moe"], "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    | {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "moe_intermediate_size": 32}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "conv_kernel": 4, "mlp_hidden_act": "relu2"},
    "FalconH1ForCausalLM": LLAMA
    | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 16, "mamba_rms_norm": True}
    | {"attention_bias": False, "ssm_multipliers": [0.5] * 5, "mlp_multipliers": [0.5] * 2, "key_multiplier": 0.5},
    "GraniteForCausalLM": LLAMA
    | {"embedding_multiplier": 2, "attention_multiplier": 0.1, "residual_multiplier": 0.2, "logits_scaling": 8},
    "Phi3ForCausalLM": LLAMA
    | {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 32, "sliding_window": 16}
    | {"rope_scaling": {"type": "longrope", **LONG}},
    "GPTNeoXForCausalLM": SIZES
    | {"rotary_pct": 0.5, "rotary_emb_base": 10_000, "use_parallel_residual": True, "layer_norm_eps": 1e-5},
    "GPTJForCausalLM": {"vocab_size": 100, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "rotary_dim": 8},
    "GPTBigCodeForCausalLM": {"vocab_size": 100, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": None}
    | {"multi_query": True, "scale_attn_weights": True, "activation_function": "gelu"},
    "FalconForCausalLM": SIZES
    | {"new_decoder_architecture": True, "bias": False, "alibi": False, "parallel_attn": True, "multi_query": True}
    | {"num_ln_in_parallel_attn": 2, "num_kv_heads": 2, "activation": "gelu"},
    "OPTForCausalLM": SIZES
    | {"do_layer_norm_before": True, "word_embed_proj_dim": 32, "enable_bias": True, "activation_function": "relu"}
    | {"_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
    "ChatGLMModel": {"padded_vocab_size": 100, "hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 4}
    | {"num_attention_heads": 4, "kv_channels": 16, "multi_query_attention": True, "multi_query_group_num": 2}
    | {"rmsnorm": True, "rope_ratio": 2, "add_qkv_bias": True, "seq_length": 64, "layernorm_epsilon": 1e-5},
    "BaichuanForCausalLM": SIZES | {"model_max_length": 64},
    "DeepseekForCausalLM": LLAMA
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
    | {"first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax"},
    "T5ForConditionalGeneration": {"vocab_size": 100, "d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    | {"d_kv": 16, "num_decoder_layers": 2, "layer_norm_epsilon": 1e-6, "feed_forward_proj": "gated-gelu"}
    | {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "tie_word_embeddings": False}
    | {"scale_decoder_outputs": False},
}
UNNAMED = {"architectures", "hidden_act", "mlp_hidden_act", "activation", "activation_function", "rope_type"}
"""Members whose value is named, not the member."""


def places(config: Mapping[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
    """The ways to all members, also those of objects in objects."""
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, *above, key)


def changed(config: Mapping[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    copy: Any = deepcopy(dict(config))
    parent = copy
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = value
    return dict(copy)


def refused(read: Callable[[Path], Any], folder: Path) -> str:
    """Why `read` refuses the folder, or an empty string; the facts that it reads have the right types."""
    try:
        require_types(read(folder))
    except ConfigurationError as error:
        return str(error)
    return ""


def require_types(facts: Any) -> None:
    """Each fact has the type that its field says."""
    for fact in fields(facts):
        value, kind = getattr(facts, fact.name), str(fact.type)
        if is_dataclass(value):
            require_types(value)
        elif kind in ("int", "float", "str", "bool", "int | None", "float | None"):
            allowed = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}[kind.split(" ")[0]]
            assert type(value) in allowed or (value is None and "None" in kind), (fact.name, value)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_member_of_another_type_is_read_or_refused(tmp_path: Path, architecture: str) -> None:
    config = {"architectures": [architecture], **CONFIGS[architecture]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    require_types(load_config(tmp_path))
    for place in places(config):
        for value in WRONG:
            path.write_text(json.dumps(changed(config, place, value)))
            if refusal := refused(load_config, tmp_path):
                assert "wrong type or value" not in refusal, (place, value, refusal)
                if isinstance(value, str | list | dict) and value and not UNNAMED & set(place):
                    assert place[-1] in refusal, (place, value, refusal)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_routers_read_or_refuse_it_too(tmp_path: Path, architecture: str) -> None:
    config = {"architectures": [architecture], **CONFIGS[architecture]}
    (tmp_path / "tokenizer.json").write_text("{}")
    for place in places(config):
        for value in WRONG:
            (tmp_path / "config.json").write_text(json.dumps(changed(config, place, value)))
            if refusal := refused(read_model_facts, tmp_path):
                assert any(key.removeprefix("padded_") in refusal for key in place), (place, value, refusal)


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("member", ["rope_parameters", "rope_scaling"])
def test_rotary_positions_of_another_type_are_overridden_or_refused(tmp_path: Path, member: str, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **SIZES, member: value}))
    rope = RopeOverride('{"rope_type": "linear", "factor": 2.0}')
    if value is None or isinstance(value, dict):
        assert "kind='linear'" in repr(load_config(tmp_path, rope))
    else:
        with pytest.raises(ConfigurationError, match=f"config.json: {member} must be an object"):
            load_config(tmp_path, rope)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"short_factor": [1.0] * 3}, "short_factor must have 4 numbers, .*, got 3"),
        ({"long_factor": [1.0] * 8}, "long_factor must have 4 numbers, .*, got 8"),
        ({"short_factor": [1.0, 1.0, 1.0, -1.0]}, "short_factor must be a list of numbers above 0"),
        ({"long_factor": [1.0, 1.0, 1.0, "1"]}, "long_factor must be a list of numbers above 0"),
        ({"type": "llama3", **LOW_HIGH, "low_freq_factor": 4.0}, r"high_freq_factor \(4\) must be above low_freq"),
        ({"partial_rotary_factor": 4.0}, "64 of 16 dimensions of a head are rotated"),
        ({"factor": 10**400}, "wrong type or value: OverflowError"),
    ],
)
def test_scalings_that_do_not_fit_are_refused(tmp_path: Path, rope: dict[str, Any], words: str) -> None:
    config = CONFIGS["Phi3ForCausalLM"] | {"rope_scaling": {"type": "longrope", **LONG} | rope}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Phi3ForCausalLM"], **config}))
    with pytest.raises(ConfigurationError, match=words):
        load_config(tmp_path)


@pytest.mark.parametrize("kind", ["chunked_attention", "x"])
def test_layers_of_another_kind_are_refused(tmp_path: Path, kind: str) -> None:
    config = CONFIGS["Qwen2ForCausalLM"] | {"layer_types": ["full_attention", "sliding_attention", kind, kind]}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **config}))
    with pytest.raises(ConfigurationError, match=f"layer_types may name full_attention and .*, not '{kind}'"):
        load_config(tmp_path)
