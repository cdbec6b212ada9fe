"""Measures this machine: how fast its memory is read, and how fast the engine's own linear layers multiply.

Bandwidth is that of summing a large array, on one core and on all that are asked for. Rates of arithmetic are those of
the engine computing a prompt with a small model of wide layers, so that they contain what the engine makes of the
machine, and leave only the model's own shape to be predicted.
"""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from bench.capacity import Capacity, DeviceRates, Precision, model_size
from bench.devices import Device
from bench.engine_steps import EngineSteps, StepPlan, clock_for
from bench.shapes import BUNDLED
from engine.models.config import load_decoder_config

_ARRAY_BYTES = 256 * 2**20  # several times the largest cache
_REPEATS = 5
_PROMPT_TOKENS = 256
_WIDE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "max_position_embeddings": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "vocab_size": 1024,
}


@dataclass(frozen=True, slots=True)
class Probed:
    """What was found. Rates of arithmetic, and the device, are those of `num_threads` threads."""

    num_threads: int
    one_core_bytes_per_s: float
    all_cores_bytes_per_s: float
    flops_per_s: dict[str, float]

    def device(self) -> Device:
        """As a device to plan for; its memory is what is free now."""
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return Device(
            f"this machine, {threads}",
            psutil.virtual_memory().available,
            self.all_cores_bytes_per_s,
            self.flops_per_s,
            "measured now",
        )


def probe(num_threads: int) -> Probed:
    """Measure; takes a few seconds."""
    one_core, all_cores = (read_bytes_per_s(threads) for threads in (1, num_threads))
    with tempfile.TemporaryDirectory() as folder:
        model_dir = _write_wide_model(Path(folder))
        rates = {
            "float32": engine_flops_per_s(model_dir, "none", num_threads),
            "int8": engine_flops_per_s(model_dir, "int8", num_threads),
        }
    return Probed(num_threads, one_core, all_cores, rates)


def read_bytes_per_s(num_threads: int) -> float:
    """Of reading memory once, best of several."""
    torch.set_num_threads(num_threads)
    array = torch.ones(_ARRAY_BYTES // 4)
    clock, times_s = clock_for(num_threads), []
    for _ in range(_REPEATS):
        begun_s = clock()
        array.sum()
        times_s.append(clock() - begun_s)
    return _ARRAY_BYTES / min(times_s)


def engine_flops_per_s(model_dir: Path, quantize: str, num_threads: int) -> float:
    """Of a prompt's pass through the engine, best of several; the first one compiles."""
    steps = EngineSteps(StepPlan(model_dir, quantize, 1, _PROMPT_TOKENS, num_threads=num_threads))
    times_ms = [steps.prompt_ms() for _ in range(1 + _REPEATS)]
    size = model_size(load_decoder_config(model_dir))
    flops = Capacity(size, Precision("float32", "float32"), DeviceRates(0, 1, 1, 1)).prefill_flops(_PROMPT_TOKENS)
    return 1000 * flops / min(times_ms)


def _write_wide_model(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(_WIDE))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder / name)
    return folder
