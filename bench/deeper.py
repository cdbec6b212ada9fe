"""Makes a small model as slow as a large one, by adding layers that do not change its output."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_LAYER = "model.layers.{}."
_OUTPUT_MATRICES = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""Output matrices of a layer. If they are zero, the layer does not change the residual stream."""


def write_deeper(model_dir: Path, num_extra: int, folder: Path) -> Path:
    """Copy a Llama checkpoint and add `num_extra` layers with the shapes of the last layer; returns the new folder."""
    deeper = folder / f"{model_dir.name}+{num_extra}"
    shutil.copytree(model_dir, deeper)
    config = json.loads((model_dir / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    tensors = load_file(model_dir / "model.safetensors")
    last_layer = {name: tensor for name, tensor in tensors.items() if name.startswith(_LAYER.format(num_layers - 1))}
    for extra in range(num_extra):
        for name, tensor in last_layer.items():
            part = name.removeprefix(_LAYER.format(num_layers - 1))
            tensors[_LAYER.format(num_layers + extra) + part] = (
                torch.zeros_like(tensor) if part in _OUTPUT_MATRICES else tensor.clone()
            )
    save_file(tensors, deeper / "model.safetensors", metadata={"format": "pt"})
    (deeper / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers + num_extra}))
    return deeper
