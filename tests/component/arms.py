"""The ways in which the CPU runs a model, each with the settings that ask for it."""

from pathlib import Path

import pytest
import torch

from engine.kernels.cpu.machine import why_no_loops
from engine.loading.load_runner import load_model_runner
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.runner_settings import RunnerSettings

ARMS: dict[str, dict[str, object]] = {
    "compiled": {},
    "cpu": {"enforce_eager": True},
    "torch": {"enforce_eager": True, "block_size": 4, "num_blocks": 128},
}
"""By the name of the attention backend."""


def settings(model_dir: Path, **changes: object) -> RunnerSettings:
    """Room for the prompts of `parity`, and several groups of layers."""
    return RunnerSettings(model_dir, **{"num_blocks": 64, "block_size": 16, "layers_per_group": 2} | changes)  # type: ignore[arg-type]


def load_arm(model_dir: Path, arm: str, **changes: object) -> ModelRunner:
    """A runner that computes in this way and no other; skips the test where the CPU cannot."""
    if arm != "torch" and (reason := why_no_loops()):
        pytest.skip(reason)
    runner = load_model_runner(settings(model_dir, **ARMS[arm] | changes))
    assert runner.attention_backend == arm
    return runner


def embedding(runner: ModelRunner) -> torch.Tensor:
    """The embedding that the runner's model reads, to be changed: [vocab_size, hidden]."""
    model = runner.model
    found: torch.Tensor = model._embedding.weight if isinstance(model, Decoder) else model._embed
    return found
