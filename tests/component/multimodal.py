"""Small random multimodal checkpoints, of whose models the text part is served."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from checkpoint.config_json import text_part
from checkpoint.multimodal import other_part
from tests.component.checkpoints import WINDOW, randomise, save_tokenizer
from tests.component.newest_families import MIXTURES

_TEXT = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 8, "patch_size": 4}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "intermediate_size": 32}
_QWEN3_VISION = _QWEN_VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_GROWING = {"rope_type": "yarn", "factor": 16.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 32}
_GROWING |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
_MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}

CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({"model_type": "gemma3_text", "sliding_window": WINDOW, "sliding_window_pattern": 2}, _VISION),
    "gemma4": (
        {"sliding_window": WINDOW, "global_head_dim": 32, "hidden_size_per_layer_input": 0},
        _VISION | {"head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 8},
    ),
    "llama4": (
        {"attention_chunk_size": 16, "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4},
        _VISION | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "llava": ({"model_type": "llama"}, _VISION | {"model_type": "clip_vision_model"}),
    "mistral3": (
        {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": True},
        _VISION | {"model_type": "pixtral"},
    ),
    "mistral3-ministral3": (
        {"model_type": "ministral3", "rope_parameters": _GROWING, "tie_word_embeddings": True},
        _VISION | {"model_type": "pixtral"},
    ),
    "mistral3-mistral4": (
        MIXTURES["mistral4"] | {"head_dim": 48, "rope_parameters": _GROWING, "tie_word_embeddings": True},
        _VISION | {"model_type": "pixtral"},
    ),
    "qwen2_5_vl": ({"rope_parameters": _MROPE}, _QWEN_VISION | {"out_hidden_size": 64}),
    "qwen3_5": (
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "rope_parameters": _MROPE}
        | {
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        _QWEN_VISION | {"out_hidden_size": 64, "num_position_embeddings": 16},
    ),
    "qwen3_vl": ({"rope_parameters": _MROPE | {"mrope_interleaved": True}}, _QWEN3_VISION),
    "qwen3_vl_moe": (
        {"rope_parameters": _MROPE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"mlp_only_layers": [1], "tie_word_embeddings": False},
        _QWEN3_VISION,
    ),
    "smolvlm": ({"model_type": "llama"}, _VISION),
}
"""Members of `text_config` and `vision_config`, by the model_type of the whole, and of its text if it may be others."""


def multimodal(case: str) -> PreTrainedModel:
    """transformers' own class, with random weights."""
    text, vision = CASES[case]
    config = AutoConfig.for_model(case.partition("-")[0], text_config=_TEXT | text, vision_config=vision)
    torch.manual_seed(0)
    name = type(config).__name__.removesuffix("Config") + "ForConditionalGeneration"
    model: PreTrainedModel = getattr(transformers, name)(config)
    randomise(model)
    model.tie_weights()
    return model.eval()


def build_multimodal(case: str, model_dir: Path) -> Path:
    multimodal(case).save_pretrained(model_dir)
    save_tokenizer(model_dir)
    return model_dir


def text_alone(model_dir: Path, out: Path) -> Path:
    """A copy with nothing but the text part, under the names of a model of text. Returns `out`."""
    shutil.copytree(model_dir, out)
    stored = load_file(model_dir / "model.safetensors")
    kept = {_plain(name): tensor for name, tensor in stored.items() if other_part(name) is None}
    save_file(kept, out / "model.safetensors", {"format": "pt"})
    path = out / "config.json"
    path.write_text(json.dumps(text_part(json.loads(path.read_text()))))
    return out


def _plain(name: str) -> str:
    for prefix in ("model.language_model.", "language_model.model.", "model.text_model."):
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix("language_model.")
