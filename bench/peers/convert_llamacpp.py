"""Turns a checkpoint into a GGUF file: python -m bench.peers.convert_llamacpp CHECKPOINT TARGET FORMAT.

FORMAT is a GGUF type such as Q8_0, for all matrices including the embedding. The vocabulary consists of placeholder
words, because prompts and answers are token ids.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows [heads x (2 halves)] for the rotary embedding of GGUF, which rotates neighbours instead of
    halves.
    """
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the hyperparameters and a placeholder vocabulary."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    special = {0: gguf.TokenType.UNKNOWN, 1: gguf.TokenType.CONTROL, 2: gguf.TokenType.CONTROL}
    size = config["vocab_size"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{token}" for token in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([special.get(token, gguf.TokenType.NORMAL) for token in range(size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def convert(checkpoint: Path, target: Path, weights: str) -> None:
    """Convert the weights and write `target/model.gguf`."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    target.mkdir(parents=True)
    writer = gguf.GGUFWriter(target / "model.gguf", "llama")
    describe(writer, config)
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        layer = name.split(".")[-2]
        matrix = interleaved(weight, heads[layer]) if layer in heads else weight
        kind = gguf.GGMLQuantizationType[weights] if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(matrix, kind)
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
