"""The text part of a multimodal config.json, as published."""

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint.model_facts import read_model_facts
from engine.models.read_config import load_config
from mesh.domain.errors import ConfigurationError

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], set[int]]] = {
    "Gemma 3 4B": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10_240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
        },
        {"architecture": "Gemma3ForCausalLM", "num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "vocab_size": 262_208}
        | {"tied": True, "dtype": "bfloat16", "max_model_len": 131_072},
        {1, 106},
    ),
    "Mistral Small 3.1 24B": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {
                "head_dim": 128,
                "hidden_size": 5120,
                "intermediate_size": 32_768,
                "max_position_embeddings": 131_072,
                "model_type": "mistral",
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1_000_000_000.0,
                "sliding_window": None,
                "vocab_size": 131_072,
            },
            "torch_dtype": "bfloat16",
        },
        {"architecture": "MistralForCausalLM", "tied": False, "windows": (None,) * 40, "dtype": "bfloat16"},
        set(),
    ),
    "Qwen 2.5 VL 3B, without text_config": (
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "eos_token_id": 151_645,
            "hidden_size": 2048,
            "intermediate_size": 11_008,
            "max_position_embeddings": 128_000,
            "max_window_layers": 70,
            "model_type": "qwen2_5_vl",
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1_000_000.0,
            "sliding_window": 32_768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vision_config": {"depth": 32, "hidden_size": 1280},
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vocab_size": 151_936,
        },
        {"architecture": "Qwen2ForCausalLM", "tied": True, "qkv_bias": True, "max_model_len": 128_000},
        {151_645},
    ),
    "Qwen 3 VL 4B": (
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "text_config": {
                "attention_bias": False,
                "dtype": "bfloat16",
                "eos_token_id": 151_645,
                "head_dim": 128,
                "hidden_size": 2560,
                "intermediate_size": 9728,
                "max_position_embeddings": 262_144,
                "model_type": "qwen3_vl_text",
                "num_attention_heads": 32,
                "num_hidden_layers": 36,
                "num_key_value_heads": 8,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
                "rope_theta": 5_000_000,
                "tie_word_embeddings": True,
                "vocab_size": 151_936,
            },
            "tie_word_embeddings": True,
        },
        {"architecture": "Qwen3ForCausalLM", "tied": True, "dtype": "bfloat16", "qk_norm": True},
        {151_645},
    ),
    "LLaVA 1.5 7B": (
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "text_config": {
                "max_position_embeddings": 4096,
                "model_type": "llama",
                "rms_norm_eps": 1e-05,
                "torch_dtype": "float16",
                "vocab_size": 32_064,
            },
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
        },
        {"hidden_size": 4096, "intermediate_size": 11_008, "num_layers": 32, "num_kv_heads": 32, "vocab_size": 32_064}
        | {"tied": False, "dtype": "float16"},
        set(),
    ),
    "LLaVA 1.6 Mistral 7B": (
        {
            "architectures": ["LlavaNextForConditionalGeneration"],
            "text_config": {
                "intermediate_size": 14_336,
                "max_position_embeddings": 32_768,
                "model_type": "mistral",
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1_000_000.0,
                "sliding_window": None,
                "vocab_size": 32_064,
            },
        },
        {"num_heads": 32, "head_dim": 128, "windows": (None,) * 32, "max_model_len": 32_768},
        set(),
    ),
    "SmolVLM 256M": (
        {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "text_config": {
                "head_dim": 64,
                "hidden_size": 576,
                "intermediate_size": 1536,
                "max_position_embeddings": 8192,
                "model_type": "llama",
                "num_attention_heads": 9,
                "num_hidden_layers": 30,
                "num_key_value_heads": 3,
                "rms_norm_eps": 1e-05,
                "rope_theta": 100_000,
                "tie_word_embeddings": False,
                "vocab_size": 49_280,
            },
            "torch_dtype": "bfloat16",
        },
        {"num_kv_heads": 3, "norm_eps": 1e-05, "tied": False},
        set(),
    ),
}
"""config.json as published, without what nothing reads, what it means, and the tokens that end answers."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files(tmp_path: Path, name: str) -> None:
    raw, facts, eos = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "tokenizer.json").write_text("{}")
    config = load_config(tmp_path)
    assert {key: getattr(config, key) for key in facts} == facts
    router = read_model_facts(tmp_path)
    assert (router.vocab_size, router.max_positions) == (config.vocab_size, config.max_model_len)
    assert router.eos_token_ids == eos


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"text_config": {"model_type": "bamba"}},
            "LlavaForConditionalGeneration with a text_config of model_type 'bamba'",
        ),
        ({"text_config": [1]}, "text_config must be an object"),
        ({"text_config": {"model_type": 1}}, "model_type must be a string"),
        ({"text_config": {"hidden_size": "wide"}}, "hidden_size must be a positive integer"),
    ],
)
def test_refusals(tmp_path: Path, raw: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlavaForConditionalGeneration"]} | raw))
    with pytest.raises(ConfigurationError, match=message):
        load_config(tmp_path)
