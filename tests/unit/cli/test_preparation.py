"""`tandem up --partition`: what is written before the start, and what is refused."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from checkpoint.partition_manifest import read_partition
from engine.kernels.cpu.machine import why_no_loops
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tandem_cli.configuration.up_settings import UpSettings
from tandem_cli.local_mesh.deployment import Deployment, ModelDeployment
from tandem_cli.local_mesh.display import Display
from tandem_cli.local_mesh.hardware import CoreAssignment
from tandem_cli.local_mesh.preparation import with_partition
from tandem_cli.model_files.model_folders import BUNDLED
from tests.warm import forks

__all__ = ["forks"]

Prepared = Callable[..., Deployment]
DISPLAY = Display(Console(quiet=True))


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    """A deployment for models with a partition below `tmp_path`."""

    def deployment(*folders: Path, **values: dict[str, str]) -> Deployment:
        cores = CoreAssignment(((0,),), ((0,),))
        models = tuple(ModelDeployment(f"m{number}", str(folder), cores) for number, folder in enumerate(folders))
        return Deployment(UpSettings(partition=str(tmp_path / "out")), models, pin=False, values=values)

    return deployment


def test_a_plan_without_a_partition_stays(tmp_path: Path) -> None:
    deployment = Deployment(UpSettings(), (ModelDeployment("m", str(tmp_path), CoreAssignment(((0,),), ((0,),))),))
    assert with_partition(deployment, {}, DISPLAY) is deployment


def test_the_workers_degree_and_quantization_are_written_once(prepared: Prepared, tmp_path: Path) -> None:
    if reason := why_no_loops():
        pytest.skip(reason)
    values = {role: {"tensor_parallel": "2", "quantize": "int8"} for role in ("prefill", "decode")}
    deployment = prepared(BUNDLED, **values)
    for _ in range(2):
        [model] = with_partition(deployment, {}, DISPLAY).models
        assert (model.name, model.folder) == ("m0", str(tmp_path / "out"))
    partition = read_partition(tmp_path / "out")
    assert partition is not None
    partition.require(Degrees(2), "int8", "float32")


def test_workers_that_differ_are_named(prepared: Prepared, tmp_path: Path) -> None:
    deployment = prepared(tmp_path, prefill={"tensor_parallel": "2"}, decode={"quantize": "int8"})
    expected = r"tensor_parallel 1, .* dtype auto with quantize int8 and tensor_parallel 2, .* with quantize none"
    with pytest.raises(ConfigurationError, match=expected):
        with_partition(deployment, {}, DISPLAY)


def test_several_models_are_refused(prepared: Prepared, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--partition is for a mesh with one model"):
        with_partition(prepared(tmp_path, tmp_path), {}, DISPLAY)


def test_the_reason_of_a_failure_is_told(prepared: Prepared, tmp_path: Path) -> None:
    config = {"architectures": ["T5ForConditionalGeneration"], "d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2}
    config |= {"num_layers": 1, "vocab_size": 32, "feed_forward_proj": "relu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=r"^an encoder-decoder model cannot be partitioned"):
        with_partition(prepared(tmp_path), {}, DISPLAY)


def test_a_signal_ends_the_child_and_waits_for_it(
    tmp_path: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600")
    program.chmod(0o700)
    children: list[subprocess.Popen[str]] = []
    communicate: Any = subprocess.Popen.communicate

    def end_and_communicate(process: subprocess.Popen[str]) -> Any:
        children.append(process)
        if len(children) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return communicate(process)

    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr(subprocess.Popen, "communicate", end_and_communicate)
    handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with pytest.raises(SystemExit):
            with_partition(prepared(tmp_path), {}, DISPLAY)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert [child.returncode for child in children] == [-signal.SIGTERM] * 2
