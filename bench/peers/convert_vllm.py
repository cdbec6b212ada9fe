"""Quantises a checkpoint for vLLM: python -m bench.peers.convert_vllm CHECKPOINT TARGET w8a8.

The result is W8A8 in the compressed-tensors format: int8 weights with one scale per output channel, and int8
activations with one scale per token, computed at run time. The tied embedding stays unquantised, as usual in this
format.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, int8


def quantization(strategy: str, *, dynamic: bool) -> dict[str, Any]:
    """Quantization of the weights or of the activations of linear layers."""
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": dynamic}


CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": quantization("channel", dynamic=False),
            "input_activations": quantization("token", dynamic=True),
        }
    },
}


def quantized(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A linear layer's weight [out, in] as int8 with scales [out, 1]; other tensors unchanged."""
    if not name.endswith("proj.weight"):
        return {name: weight}
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {name: (weight / scale).round().to(int8), name.replace(".weight", ".weight_scale"): scale}


def convert(checkpoint: Path, target: Path) -> None:
    """Quantize the weights and write a complete checkpoint to `target`."""
    shutil.copytree(checkpoint, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        tensors |= quantized(name, weight)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}, indent=1))


if __name__ == "__main__":
    if sys.argv[3] != "w8a8":
        raise SystemExit(f"no format {sys.argv[3]}")
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
