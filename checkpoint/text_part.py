"""The text part of a multimodal model: its config.json, and the names of its tensors. Standard library only.

Everything that reads a model's config.json takes it from `read_config`, which returns the text part as if it were a
model of its own. Published files leave out what is the default of transformers' class for `text_config`, so these
defaults are written down here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checkpoint.config_json import RawConfig, first_of, read_json, section, text, texts
from mesh.domain.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class TextModel:
    """A kind of text part: the architecture that computes it, and the defaults of its members."""

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


_LLAMA = {"vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_QWEN = {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32}
_QWEN |= {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32_768}
_QWEN_VL = {"vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80}
_QWEN_VL |= {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32_768}
_QWEN_VL |= {"rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1e6}
_QWEN3_VL = _QWEN | {"head_dim": 128, "max_position_embeddings": 128_000, "rope_theta": 5e5}
_GEMMA3 = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_GEMMA3 |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072}
_MISTRAL = _LLAMA | {"intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072}

TEXT_MODELS: Mapping[str, TextModel] = MappingProxyType(
    {
        "gemma3_text": TextModel("Gemma3ForCausalLM", _GEMMA3),
        "granite": TextModel("GraniteForCausalLM", _LLAMA | {"intermediate_size": 11_008}),
        "llama": TextModel("LlamaForCausalLM", _LLAMA | {"intermediate_size": 11_008}),
        "ministral3": TextModel("Ministral3ForCausalLM"),
        "mistral": TextModel("MistralForCausalLM", _MISTRAL),
        "qwen2": TextModel("Qwen2ForCausalLM", _QWEN),
        "qwen2_vl_text": TextModel("Qwen2ForCausalLM", _QWEN_VL),
        "qwen2_5_vl_text": TextModel("Qwen2ForCausalLM", _QWEN_VL),
        "qwen3": TextModel("Qwen3ForCausalLM", _QWEN | {"head_dim": 128}),
        "qwen3_vl_text": TextModel("Qwen3ForCausalLM", _QWEN3_VL),
    }
)
"""By the `model_type` of `text_config`. Members whose default is that of our own readers are left out, and those of
Ministral 3, which its files state.
"""

WRAPPERS: Mapping[str, str] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": "gemma3_text",
        "Idefics2ForConditionalGeneration": "mistral",
        "Idefics3ForConditionalGeneration": "llama",
        "InternVLForConditionalGeneration": "qwen2",
        "LlavaForConditionalGeneration": "llama",
        "LlavaNextForConditionalGeneration": "llama",
        "LlavaOnevisionForConditionalGeneration": "qwen2",
        "Mistral3ForConditionalGeneration": "mistral",
        "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
        "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
        "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
        "SmolVLMForConditionalGeneration": "llama",
    }
)
"""The multimodal architectures, and the kind of text part of those whose `text_config` does not name it."""

_KINDS = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text", "gemma3": "gemma3_text"}
"""Other names of kinds: early Qwen 2 VL has its text part's members beside `vision_config`, and one model_type."""
_TIED, _DTYPE = "tie_word_embeddings", ("dtype", "torch_dtype")
_OF_CHECKPOINT = ("eos_token_id", "quantization_config", "compression_config", "is_encoder_decoder")
"""Members that stand outside of `text_config`."""


_OTHER_PARTS = re.compile(
    r"^(?:model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector|perceiver_resampler|image_newline)\b"
)


def read_config(model_dir: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint; of a multimodal one, its text part. Raises ConfigurationError."""
    return text_part(read_json(model_dir / "config.json"))


def text_part(raw: RawConfig) -> dict[str, Any]:
    """A config.json as it is, or its text part if its architecture is in WRAPPERS. Raises ConfigurationError."""
    wrapper = next((name for name in texts(raw, "architectures") if name in WRAPPERS), None)
    if wrapper is None:
        return dict(raw)
    stated = section(raw, "text_config") or raw
    kind = text(stated, "model_type", default=WRAPPERS[wrapper])
    model = TEXT_MODELS.get(_KINDS.get(kind, kind))
    if model is None:
        raise ConfigurationError(
            f"{wrapper} with a text_config of model_type {kind!r} is not supported; supported: {', '.join(TEXT_MODELS)}"
        )
    part = {**model.defaults, **stated, "architectures": [model.architecture]}
    part |= {key: raw[key] for key in _OF_CHECKPOINT if raw.get(key) is not None}
    if section(stated, "rope_parameters").get("rope_theta") is not None:
        part["rope_theta"] = stated.get("rope_theta")
    # Where both say so, transformers 4 takes what text_config says.
    if part.get(_TIED) is None:
        part.pop(_TIED, None)
        part |= {_TIED: raw[_TIED]} if raw.get(_TIED) is not None else {}
    return part | {"dtype": first_of(raw, _DTYPE, first_of(stated, _DTYPE))}


def possible_names(name: str) -> tuple[str, ...]:
    """The names that tensor or module `name` may have in files: checkpoints of base models omit its first component,
    multimodal ones put the text part under one of their own.
    """
    bare = name.partition(".")[2]
    return name, bare, f"language_model.{name}", f"model.language_model.{bare}", f"model.text_model.{bare}"


def other_part(name: str) -> str | None:
    """The part of a multimodal model that a tensor belongs to, such as "vision_tower"; None if that may be text's."""
    found = _OTHER_PARTS.search(name)
    return None if found is None else found[1]
