"""Model shapes for benchmarks. A model folder has a configuration and the bundled tokenizer; weights are optional."""

import json
from math import prod
from pathlib import Path

import numpy as np

from checkpoint.tensors import SINGLE_FILE
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from tandem_cli.model_folders import write_without_weights

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
    "3b": {
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 11008,
        "vocab_size": 151936,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "narrow": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 32000,
    },
}
LONG = "-long"
"""At the end of a shape's name: the same shape with room for _LONG_POSITIONS tokens."""
_POSITIONS, _LONG_POSITIONS = 2048, 2**18


def positions_of(name: str) -> int:
    """The most tokens of a prompt and its answer together that a model of the shape takes."""
    return _LONG_POSITIONS if name.endswith(LONG) else _POSITIONS


def write_shape(name: str, folder: Path) -> Path:
    """Write a model folder of the shape `name` below `folder`, for load_format=dummy; returns the model folder.
    A name may end with LONG.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": positions_of(name),
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[name.removesuffix(LONG)],
    }
    return write_without_weights(folder / name, config)


def write_weights(model_dir: Path, seed: int = 0) -> Path:
    """Write random weights in fp32 for the folder's configuration, one tensor at a time; returns the file."""
    sources = [source for spec in parameter_specs(load_decoder_config(model_dir)) for source in spec.sources]
    header, end = {}, 0
    for source in sources:
        first, end = end, end + 4 * prod(source.shape)
        header[source.name] = {"dtype": "F32", "shape": source.shape, "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator, path = np.random.default_rng(seed), model_dir / SINGLE_FILE
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for source in sources:
            file.write((0.02 * generator.standard_normal(prod(source.shape), np.float32)).data)
    return path
