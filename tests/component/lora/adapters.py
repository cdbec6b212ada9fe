"""Random LoRA adapters in PEFT's format, and transformers' models with an adapter merged into their weights."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from checkpoint.adapters import AdapterFiles, read_adapter
from engine.model_runner import ModelRunner
from engine.models.parameters import Source, parameter_specs
from engine.models.read_config import load_decoder_config
from tests.component.driving import Driver, Run
from tests.component.parity import NUM_NEW, NUM_TOP, expect, prompts, require_same
from tests.component.remote_families import load_reference
from tests.fakes.requests import make_request

SIZE = 0.2
"""Standard deviation of adapters' numbers: large, so that an adapter changes most answers of a small model."""
PREFIX = "base_model.model."


def linear_modules(model_dir: Path) -> dict[str, Source]:
    """The matrices of attention, MLPs and experts, by the names of their modules."""
    return {
        source.name.removesuffix(".weight"): source
        for spec in parameter_specs(load_decoder_config(model_dir))
        if spec.is_matrix and spec.name.startswith("layers.")
        for source in spec.sources
    }


def write_adapter(
    model_dir: Path, folder: Path, *, rank: int = 4, targets: str = "", seed: int = 0, **config: Any
) -> Path:
    """An adapter of the modules whose names have `targets`, a regular expression. `config` changes
    adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, source in linear_modules(model_dir).items():
        if re.search(targets, module):
            outputs, inputs = source.shape[::-1] if source.transposed else source.shape
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


def four_adapters(model_dir: Path, folder: Path) -> tuple[AdapterFiles, ...]:
    """Of several ranks and targets, with each kind of scale and both patterns."""
    return read_adapters(
        write_adapter(model_dir, folder / "a", rank=16, seed=1),
        write_adapter(model_dir, folder / "b", rank=3, targets="[qv]_proj", seed=2, use_rslora=True),
        write_adapter(model_dir, folder / "c", rank=20, targets="mlp", seed=3, alpha_pattern={r"layers\.1\..*": 9}),
        write_adapter(model_dir, folder / "d", targets="o_proj|up_proj", seed=4, rank_pattern={"up_proj": 17}),
    )


def run_together(runner: ModelRunner, digests: dict[int, str]) -> list[Run]:
    """A sequence for each number, with this adapter ("": none): all in the same steps, in chunks, then decodes."""
    driver, options = Driver(runner), {"max_new_tokens": NUM_NEW, "prompt_logprobs": True, "top_logprobs": NUM_TOP}
    runs = [
        driver.add(make_request(f"r{number}", prompts()[number % 3], adapter=digest, **options))
        for number, digest in digests.items()
    ]
    driver.finish(*runs, chunk=7)
    for run in runs:
        runner.forget(run.sequence)
    return runs


def check_adapters(model_dir: Path, runner: ModelRunner, adapters: Sequence[AdapterFiles], tolerance: float) -> None:
    """The answers of each adapter are those of transformers with the adapter merged, beside rows of the base model."""
    digests = ["", *(adapter.digest for adapter in adapters), ""]
    runs = run_together(runner, dict(enumerate(digests)))
    for number, adapter in enumerate(adapters, start=1):
        expected = expect(merged_reference(model_dir, adapter.folder), prompts()[number % 3])
        require_same(runs[number], expected, tolerance)
    base = run_together(runner, {1: ""})
    assert base[0].prompt_logprobs != runs[1].prompt_logprobs, "the adapter changes nothing"


@torch.no_grad()
def merged_reference(model_dir: Path, folder: Path) -> Any:
    """transformers' model of the checkpoint with W + scale * b @ a, computed from the files as PEFT says."""
    merged = shutil.copytree(model_dir, folder / "merged", dirs_exist_ok=True)
    weights, modules = load_file(model_dir / "model.safetensors"), linear_modules(model_dir)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in {name.rpartition(".lora_")[0] for name in tensors}:
        module = name.removeprefix(PREFIX)
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        alpha = _of_module(module, config.get("alpha_pattern", {}), config["lora_alpha"])
        change = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a)) * b @ a
        weights[f"{module}.weight"] += change.T if modules[module].transposed else change
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return load_reference(merged)


def _of_module(module: str, pattern: dict[str, int], default: int) -> int:
    return next((value for key, value in pattern.items() if re.fullmatch(rf"(.*\.)?({key})", module)), default)
