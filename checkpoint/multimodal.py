"""The text parts of multimodal models: the architectures that compute them, and the names of their tensors.

Published files leave out what is the default of transformers' class for `text_config`, so these defaults are written
down here. `checkpoint.config_json.read_config` makes the config.json of a model of text alone of them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class TextModel:
    """A kind of text part: the architecture that computes it, and the defaults of its members."""

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


_Facts = dict[str, float]
_LLAMA: _Facts = {"vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_QWEN: _Facts = {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32}
_QWEN |= {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32_768}
_QWEN_VL: _Facts = {"vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80}
_QWEN_VL |= {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32_768}
_QWEN_VL |= {"rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1e6}
_QWEN3_VL = _QWEN | {"head_dim": 128, "max_position_embeddings": 128_000, "rope_theta": 5e5}
_QWEN3_5: _Facts = {"vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32}
_QWEN3_5 |= {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32_768}
_QWEN3_5_MOE = _QWEN3_5 | {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "num_experts": 256}
_QWEN3_5_MOE |= {"num_experts_per_tok": 8, "moe_intermediate_size": 512}
_QWEN3_VL_MOE = _QWEN3_VL | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24}
_QWEN3_VL_MOE |= {"num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408}
_QWEN3_VL_MOE |= {"num_local_experts": 60, "num_experts_per_tok": 4}
_GEMMA3: _Facts = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_GEMMA3 |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072}
_GEMMA3N = _GEMMA3 | {"vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35}
_GEMMA3N |= {"num_key_value_heads": 2, "max_position_embeddings": 32_768}
_GEMMA4 = _GEMMA3 | {"vocab_size": 262_144, "num_hidden_layers": 30}
_GEMMA4_UNIFIED = _GEMMA4 | {"max_position_embeddings": 262_144}
_LLAMA4: _Facts = {"vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48}
_LLAMA4 |= {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
_LLAMA4 |= {"max_position_embeddings": 131_072, "num_local_experts": 16}
_MISTRAL = _LLAMA | {"intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
_MINISTRAL3 = _MISTRAL | {"vocab_size": 131_072, "num_hidden_layers": 34, "head_dim": 128, "rms_norm_eps": 1e-5}
_MINISTRAL3 |= {"max_position_embeddings": 262_144}
_MISTRAL4: _Facts = {"vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36}
_MISTRAL4 |= {"num_attention_heads": 32, "max_position_embeddings": 1_048_576}
_COHERE2: _Facts = {"vocab_size": 256_000, "hidden_size": 8192, "intermediate_size": 22_528, "num_hidden_layers": 40}
_COHERE2 |= {"num_attention_heads": 64, "max_position_embeddings": 8192}

TEXT_MODELS: Mapping[str, TextModel] = MappingProxyType(
    {
        "cohere2": TextModel("Cohere2ForCausalLM", _COHERE2),
        "gemma3_text": TextModel("Gemma3ForCausalLM", _GEMMA3),
        "gemma3n_text": TextModel("Gemma3nForCausalLM", _GEMMA3N),
        "gemma4_text": TextModel("Gemma4ForCausalLM", _GEMMA4),
        "gemma4_unified_text": TextModel("Gemma4UnifiedForCausalLM", _GEMMA4_UNIFIED),
        "granite": TextModel("GraniteForCausalLM", _LLAMA | {"intermediate_size": 11_008}),
        "llama": TextModel("LlamaForCausalLM", _LLAMA | {"intermediate_size": 11_008}),
        "llama4_text": TextModel("Llama4ForCausalLM", _LLAMA4),
        "ministral3": TextModel("Ministral3ForCausalLM", _MINISTRAL3),
        "mistral": TextModel("MistralForCausalLM", _MISTRAL),
        "mistral4": TextModel("Mistral4ForCausalLM", _MISTRAL4),
        "qwen2": TextModel("Qwen2ForCausalLM", _QWEN),
        "qwen2_vl_text": TextModel("Qwen2ForCausalLM", _QWEN_VL),
        "qwen2_5_vl_text": TextModel("Qwen2ForCausalLM", _QWEN_VL),
        "qwen3": TextModel("Qwen3ForCausalLM", _QWEN | {"head_dim": 128}),
        "qwen3_5_moe_text": TextModel("Qwen3_5MoeForCausalLM", _QWEN3_5_MOE),
        "qwen3_5_text": TextModel("Qwen3_5ForCausalLM", _QWEN3_5),
        "qwen3_vl_moe_text": TextModel("Qwen3VLMoeForConditionalGeneration", _QWEN3_VL_MOE),
        "qwen3_vl_text": TextModel("Qwen3ForCausalLM", _QWEN3_VL),
    }
)
"""By the `model_type` of `text_config`. Members whose default is that of our own readers are left out."""

WRAPPERS: Mapping[str, str] = MappingProxyType(
    {
        "AyaVisionForConditionalGeneration": "cohere2",
        "Cohere2VisionForConditionalGeneration": "cohere2",
        "Gemma3ForConditionalGeneration": "gemma3_text",
        "Gemma3nForConditionalGeneration": "gemma3n_text",
        "Gemma4ForConditionalGeneration": "gemma4_text",
        "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",
        "Idefics2ForConditionalGeneration": "mistral",
        "Idefics3ForConditionalGeneration": "llama",
        "InternVLForConditionalGeneration": "qwen2",
        "Llama4ForConditionalGeneration": "llama4_text",
        "LlavaForConditionalGeneration": "llama",
        "LlavaNextForConditionalGeneration": "llama",
        "LlavaOnevisionForConditionalGeneration": "qwen2",
        "Mistral3ForConditionalGeneration": "mistral",
        "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
        "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
        "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
        "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
        "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
        "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
        "SmolVLMForConditionalGeneration": "llama",
    }
)
"""The multimodal architectures, and the kind of text part of those whose `text_config` does not name it."""

OTHER_KINDS = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text", "gemma3": "gemma3_text"}
"""Other names of kinds: early Qwen 2 VL has its text part's members beside `vision_config`, and one model_type."""

_TEXT = re.compile(r"^(?:model\.language_model|language_model\.model|model\.text_model)\.")
_OTHER_PARTS = re.compile(
    r"^(?:model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector|perceiver_resampler|image_newline"
    r"|audio_tower|embed_vision|embed_audio)\b"
)


def possible_names(name: str) -> tuple[str, ...]:
    """The names that tensor or module `name` may have in files: checkpoints of base models omit its first component,
    multimodal ones put the text part under one of their own.
    """
    bare = name.partition(".")[2]
    return name, bare, f"language_model.{name}", f"model.language_model.{bare}", f"model.text_model.{bare}"


def names_in_programs(stored: str) -> tuple[str, ...]:
    """The names that config.json may have for a module whose name in the file is `stored`."""
    return stored, *possible_names(_TEXT.sub("model.", stored))


def other_part(name: str) -> str | None:
    """The part of a multimodal model that a tensor belongs to, such as "vision_tower"; None if that may be text's."""
    found = _OTHER_PARTS.search(name)
    return None if found is None else found[1]
