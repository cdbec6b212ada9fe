"""The ways in which the CPU runs a model, each with the settings that ask for it."""

from pathlib import Path

import pytest
import torch

from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import kv_layout
from engine.model_runner import ModelRunner
from engine.models.cpu_support import why_not_compiled
from engine.models.decoder import Decoder
from engine.models.read_config import load_decoder_config
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
    wanted = settings(model_dir, **ARMS[arm] | changes)
    if arm == "compiled":
        config = load_decoder_config(model_dir)
        reason = why_not_compiled(config, kv_layout(config, wanted)) or ""
        if reason.startswith("the CPU has no"):
            pytest.skip(reason)
    runner = load_model_runner(wanted)
    assert runner.attention_backend == arm
    return runner


def embedding(runner: ModelRunner) -> torch.Tensor:
    """The embedding that the runner's model reads, to be changed: [vocab_size, hidden]."""
    model = runner._model
    found: torch.Tensor = model._embedding.weight if isinstance(model, Decoder) else model._embed
    return found
