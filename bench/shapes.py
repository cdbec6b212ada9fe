"""Model shapes for benchmarks. A model folder contains only a configuration and the bundled tokenizer, no weights."""

import json
import shutil
from pathlib import Path

BUNDLED = Path(__file__).resolve().parents[1] / "demo_model" / "tandem-small"

SHAPES = {
    "135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
    "0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 32000,
    },
}


def write_shape(name: str, folder: Path) -> Path:
    """Write a model folder of the shape `name` below `folder`, for load_format=dummy; returns the model folder."""
    model_dir = folder / name
    model_dir.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[name],
    }
    (model_dir / "config.json").write_text(json.dumps(config, indent=1))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / file, model_dir / file)
    return model_dir
