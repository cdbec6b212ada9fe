"""LoRA adapters: parity with transformers' models that have the adapter merged, and rows that do not disturb others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.adapters import AdapterFiles, find_adapters, read_adapter
from engine.model_runner import ModelRunner
from mesh.domain.errors import ConfigurationError
from tests.component.adapters import PREFIX, linear_modules, merged_reference, read_adapters, write_adapter
from tests.component.arms import load_arm
from tests.component.driving import Driver, Run
from tests.component.parity import NUM_NEW, NUM_TOP, TOLERANCE, expect, prompts, require_same
from tests.component.test_ranks import require_equal
from tests.fakes.requests import make_request

Checkpoint = Callable[[str], Path]


def run_beside(runner: ModelRunner, digests: list[str]) -> list[Run]:
    """One sequence for each of the digests, "" for the base model: all in the same steps, in chunks, then decodes."""
    driver, options = Driver(runner), {"max_new_tokens": NUM_NEW, "prompt_logprobs": True, "top_logprobs": NUM_TOP}
    asked = [prompts()[i % 3] for i in range(len(digests))]
    runs = [
        driver.add(make_request(f"r{i}", prompt, adapter=digest, **options))
        for i, (prompt, digest) in enumerate(zip(asked, digests, strict=True))
    ]
    driver.finish(*runs, chunk=7)
    return runs


def check_adapter(model_dir: Path, runner: ModelRunner, adapter: AdapterFiles, tolerance: float = TOLERANCE) -> None:
    """An adapter's answers are those of transformers with the adapter merged, beside rows of the base model."""
    merged = merged_reference(model_dir, adapter.folder)
    runs = run_beside(runner, ["", adapter.digest, "", adapter.digest])
    for run, prompt in ((runs[1], prompts()[1]), (runs[3], prompts()[0])):
        require_same(run, expect(merged, prompt), tolerance)
    assert runs[0].token_ids != runs[3].token_ids, "the adapter changes too little to show"


@pytest.mark.parametrize("family", ["llama", "llama-biases", "llama-tied", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("arm", ["compiled", "torch"])
def test_parity_with_the_merged_model(checkpoint: Checkpoint, tmp_path: Path, family: str, arm: str) -> None:
    model_dir = checkpoint(family)
    adapters = read_adapters(write_adapter(model_dir, tmp_path / "mine", rank=5))
    check_adapter(model_dir, load_arm(model_dir, arm, adapters=adapters), adapters[0], 3 * TOLERANCE)


@pytest.mark.parametrize(
    "family", ["gpt2", "gptj", "gpt-neox", "opt", "bloom", "falcon-40b", "phi", "phi3", "gemma2", "granite", "glm4"]
)
def test_parity_of_other_layouts(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """Fused, grouped and transposed matrices, other orders of rotary dimensions, factors on the residual."""
    model_dir = checkpoint(family)
    adapters = read_adapters(write_adapter(model_dir, tmp_path / "mine"))
    check_adapter(model_dir, load_arm(model_dir, "torch", adapters=adapters), adapters[0], 10 * TOLERANCE)
