"""Random LoRA adapters in PEFT's format, and transformers' models with an adapter merged into their weights."""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from checkpoint.adapters import AdapterFiles, read_adapter
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from tests.component.remote_families import load_reference

SIZE = 0.2
"""Standard deviation of adapters' numbers: large, so that an adapter changes most answers of a small model."""
PREFIX = "base_model.model."


def linear_modules(model_dir: Path) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each matrix of attention and MLPs, by the name of its module."""
    sources = [
        source
        for spec in parameter_specs(load_decoder_config(model_dir))
        if spec.is_matrix and spec.name.startswith("layers.") and spec.name.count(".") == 2
        for source in spec.sources
    ]
    shapes = {s.name.removesuffix(".weight"): s.shape[::-1] if s.transposed else s.shape for s in sources}
    return {name: (outputs, inputs) for name, (outputs, inputs) in shapes.items()}


def write_adapter(
    model_dir: Path, folder: Path, *, rank: int = 4, targets: str = "", seed: int = 0, **config: Any
) -> Path:
    """An adapter of the modules whose names have `targets`, a regular expression. `config` changes
    adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in linear_modules(model_dir).items():
        if re.search(targets, module):
            own = _of_module(module, config.get("rank_pattern", {}), rank)
            for part, shape in (("lora_A", (own, inputs)), ("lora_B", (outputs, own))):
                tensors[f"{PREFIX}{module}.{part}.weight"] = SIZE * torch.randn(shape, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": []} | config
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder


def read_adapters(*folders: Path) -> tuple[AdapterFiles, ...]:
    return tuple(read_adapter(folder.name, folder, max_rank=64) for folder in folders)


@torch.no_grad()
def merged_reference(model_dir: Path, folder: Path) -> Any:
    """transformers' model with W + scale * b @ a, computed from the files as PEFT says."""
    model = load_reference(model_dir)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in {name.rpartition(".lora_")[0] for name in tensors}:
        module = name.removeprefix(PREFIX)
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        alpha = _of_module(module, config.get("alpha_pattern", {}), config["lora_alpha"])
        change = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a)) * b @ a
        linear = model.get_submodule(module)
        linear.weight += change.T if type(linear).__name__ == "Conv1D" else change
    return model


def _of_module(module: str, pattern: dict[str, int], default: int) -> int:
    return next((value for key, value in pattern.items() if re.fullmatch(rf"(.*\.)?({key})", module)), default)
