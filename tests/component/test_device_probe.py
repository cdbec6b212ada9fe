"""Measurements of the machine and of the engine without a mesh: that they run, not what they find."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ModelFailed
from tandem_cli.capacity import measurement
from tandem_cli.capacity.measurement import EngineSteps, StepWorkload
from tandem_cli.capacity.roofline import Precision
from tandem_cli.main import main
from tandem_cli.model_files.model_folders import BUNDLED
from tests.component.checkpoints import build_checkpoint


def test_steps_of_the_engine_alone() -> None:
    steps = EngineSteps(StepWorkload(BUNDLED, "none", max_batch=3, prompt_tokens=20, context_tokens=40))
    for _ in range(2):  # what one run leaves behind must not disturb the next
        assert steps.prompt_ms() > 0
        assert steps.decode_ms(1) > 0
        assert steps.decode_ms(3) > 0


def test_a_model_whose_numbers_overflow_is_named(tmp_path: Path) -> None:
    """Its sequences fail, so a measurement that waited for their tokens would never end."""
    file = build_checkpoint("llama-tied", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, file)
    steps = EngineSteps(StepWorkload(tmp_path, "none", max_batch=1, prompt_tokens=20, context_tokens=40))
    for measure in (steps.prompt_ms, lambda: steps.decode_ms(1)):
        with pytest.raises(ModelFailed, match="NaN or infinity"):
            measure()


def test_steps_are_captured_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that times with and without graphs differ."""
    asked: list[RunnerSettings] = []

    class Asked(Exception):
        pass

    def load(settings: RunnerSettings, _: object) -> None:
        asked.append(settings)
        raise Asked

    monkeypatch.setattr(measurement, "load_runner_with_ranks", load)
    for enforce_eager in (False, True):
        with pytest.raises(Asked):
            EngineSteps(StepWorkload(BUNDLED, "none", max_batch=3, enforce_eager=enforce_eager))
    assert [settings.graphs.sizes for settings in asked] == [(1, 2, 4), ()]


def test_a_probe_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_ARRAY_BYTES", 2**20)
    monkeypatch.setattr(measurement, "_REPEATS", 1)
    device = measurement.probe(1)
    assert device.name == "this machine, 1 thread"
    of_bf16 = Precision("bfloat16", "bfloat16", "float16")  # a checkpoint in bf16 on a CPU with bf16 instructions
    of_fp16 = Precision("float16", "float16")
    for precision in (Precision("float32", "float32"), Precision("int8", "float32"), of_bf16, of_fp16):
        rates = device.rates(precision)
        assert min(rates.memory_bytes, rates.bandwidth_bytes_per_s, rates.flops_per_s) > 0


def test_plan_measures_beside_its_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    device = ("--memory", "1", "--bandwidth", "10", "--flops", "0.1")
    flags = ("--threads", "1", "--input-tokens", "16", "--output-tokens", "4", "--batch", "1", "2", "--json")
    assert main(["plan", "--measure", *device, *flags]) == 0
    found = json.loads(capsys.readouterr().out)  # the engine's log must not be in it
    assert all(row["measured_ms"] > 0 for row in found["predictions"])


def test_what_the_engine_does_not_have_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    device = ("--memory", "1", "--bandwidth", "10", "--flops", "0.1")
    assert main(["plan", "--measure", "--quantize", "fp8", *device]) == 2
    assert "the matrices of the checkpoint are not in fp8" in capsys.readouterr().err
