"""Model shapes for benchmarks. A model folder has a configuration and the bundled tokenizer; weights are optional.

Those without a family in their name are Llama's. The others have the layers of published models, with a vocabulary of
65,536 tokens at most.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint.tensors import SINGLE_FILE
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from tandem_cli.model_files.model_folders import write_without_weights

SHAPES: dict[str, dict[str, Any]] = {
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
    "bitnet-2b": {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "hidden_act": "relu2",
        "hidden_size": 2560,
        "num_hidden_layers": 30,
        "num_attention_heads": 20,
        "num_key_value_heads": 5,
        "intermediate_size": 6912,
        "tie_word_embeddings": True,
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
    "lfm2-350m": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 6656,
        "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
        "conv_L_cache": 3,
        "vocab_size": 65536,
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 3584,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 65536,
    },
    "granite4-h-350m": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "shared_intermediate_size": 2048,
        "num_local_experts": 0,
        "layer_types": ["attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)],
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "position_embedding_type": "nope",
        "vocab_size": 65536,
    },
    "mamba-130m": {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "state_size": 16,
        "vocab_size": 50280,
    },
    "jamba-3b-4": {  # four of its layers, the second one with attention
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "hidden_size": 2560,
        "num_hidden_layers": 4,
        "num_attention_heads": 20,
        "num_key_value_heads": 1,
        "intermediate_size": 8192,
        "attn_layer_period": 14,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "mamba_d_state": 16,
        "mamba_dt_rank": 160,
        "rms_norm_eps": 1e-6,
        "vocab_size": 65536,
    },
    "deepseek-v2-lite-6": {  # six of its layers, without experts
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "num_hidden_layers": 6,
        "first_k_dense_replace": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 10944,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "vocab_size": 65536,
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
