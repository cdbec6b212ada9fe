"""Measures the memory bandwidth of this machine, and the speed of the engine's linear layers on it.

Bandwidth is measured by summing a large array, on one core and on all requested cores. Arithmetic is measured with the
engine, on a prompt for a small model with wide layers. The rates therefore contain the efficiency of the engine, and
predictions depend only on the shape of a model.
"""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from engine.models.config import load_decoder_config
from tandem_cli.capacity.capacity import Capacity, DeviceRates, Precision, model_size
from tandem_cli.capacity.devices import Device
from tandem_cli.capacity.engine_steps import EngineSteps, StepPlan, clock_for
from tandem_cli.capacity.shapes import BUNDLED

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
    """Measured rates. `flops_per_s` has the rate with `num_threads` threads, by type of the weights."""

    num_threads: int
    one_core_bytes_per_s: float
    all_cores_bytes_per_s: float
    flops_per_s: dict[str, float]

    def device(self) -> Device:
        """This machine as a device to plan for. Its memory is the memory that is free now."""
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return Device(
            f"this machine, {threads}",
            psutil.virtual_memory().available,
            self.all_cores_bytes_per_s,
            self.flops_per_s,
            "measured now",
        )


def probe(num_threads: int) -> Probed:
    """Measure this machine with `num_threads` threads. Takes a few seconds."""
    one_core, all_cores = (read_bytes_per_s(threads) for threads in (1, num_threads))
    with tempfile.TemporaryDirectory() as folder:
        model_dir = _write_wide_model(Path(folder))
        rates = {
            "float32": engine_flops_per_s(model_dir, "none", num_threads),
            "int8": engine_flops_per_s(model_dir, "int8", num_threads),
        }
    return Probed(num_threads, one_core, all_cores, rates)


def read_bytes_per_s(num_threads: int) -> float:
    """Memory bandwidth when summing an array: the best of several runs."""
    torch.set_num_threads(num_threads)
    array = torch.ones(_ARRAY_BYTES // 4)
    clock, times_s = clock_for(num_threads), []
    for _ in range(_REPEATS):
        started_s = clock()
        array.sum()
        times_s.append(clock() - started_s)
    return _ARRAY_BYTES / min(times_s)


def engine_flops_per_s(model_dir: Path, quantize: str, num_threads: int) -> float:
    """Arithmetic of the engine in the prefill of a prompt: the best of several runs. The first run compiles kernels."""
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
