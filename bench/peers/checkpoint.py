"""Writes a checkpoint of a shape, with the same random weights for Tandem and all peers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from bench.shapes import write_shape


def write_checkpoint(shape: str, folder: Path, seed: int = 0) -> Path:
    """Write a shape's folder with fp32 weights drawn from `seed`; returns it."""
    model_dir = write_shape(shape, folder)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}, indent=1))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(model_dir))
    # The embedding is tied, so the checkpoint has no separate output matrix.
    tensors = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    partial = model_dir / "model.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(model_dir / "model.safetensors")
    return model_dir
