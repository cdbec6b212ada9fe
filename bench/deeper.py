"""A small model made as slow as a large one: layers that add nothing, so that it says the same in more time."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_LAYER = "model.layers.{}."
_ADDED = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""What a layer adds to the residual goes through these."""


def write_deeper(model_dir: Path, num_extra: int, folder: Path) -> Path:
    """A copy of a Llama checkpoint with so many layers more; returns its folder. The last layer gives their shapes."""
    deeper = folder / f"{model_dir.name}+{num_extra}"
    shutil.copytree(model_dir, deeper)
    config = json.loads((model_dir / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    tensors = load_file(model_dir / "model.safetensors")
    last = {name: each for name, each in tensors.items() if name.startswith(_LAYER.format(num_layers - 1))}
    for extra in range(num_extra):
        for name, each in last.items():
            part = name.removeprefix(_LAYER.format(num_layers - 1))
            tensors[_LAYER.format(num_layers + extra) + part] = (
                torch.zeros_like(each) if part in _ADDED else each.clone()
            )
    save_file(tensors, deeper / "model.safetensors", metadata={"format": "pt"})
    (deeper / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers + num_extra}))
    return deeper
