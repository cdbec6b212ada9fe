"""How many ranks a worker has: degrees that fit, degrees that are refused, and `max`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.partition_manifest import MANIFEST, VERSION
from decode_worker.settings import DecodeSettings
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import fitting_ranks
from engine.loading.weights import Progress
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from mesh.domain.worker import WorkerRole
from tests.component.arms import load_arm, settings
from tests.component.encoder_decoders import build_encoder_decoder
from worker.load_engine import LoadedRunner, load_engine
from worker.runner_settings import EngineLimits

Checkpoint = Callable[[str], Path]


@pytest.fixture
def compiled(checkpoint: Checkpoint) -> Path:
    """A model with 4 KV heads that this CPU can run over ranks; skips the test where it cannot."""
    model_dir = checkpoint("llama")
    assert load_arm(model_dir, "compiled").kv_cache.layout.num_kv_heads == 4
    return model_dir


def test_max_is_what_fits(compiled: Path, tmp_path: Path) -> None:
    assert [fitting_ranks(settings(compiled, tensor_parallel=size)) for size in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert fitting_ranks(settings(compiled, tensor_parallel=2, enforce_eager=True)) == 1
    assert fitting_ranks(settings(compiled, tensor_parallel=2, dtype="bfloat16")) == 2
    assert fitting_ranks(settings(compiled, tensor_parallel=2, kv_dtype="bfloat16")) == 1
    assert fitting_ranks(settings(build_encoder_decoder("t5", tmp_path), tensor_parallel=2)) == 1


def partitioned(model_dir: Path, out: Path, degrees: Degrees) -> Path:
    """What `tandem partition` writes, without the weights."""
    size = degrees.num_ranks
    shutil.copytree(model_dir, out, ignore=shutil.ignore_patterns("*.safetensors"))
    files = [{"name": f"rank-{rank}-of-{size}.safetensors", "num_bytes": 1, "xxh3": ""} for rank in range(size)]
    manifest = {"version": VERSION, "weights_digest": "00", "quantize": "none", "dtype": "float32", "files": files}
    manifest["source"] = {}
    manifest |= {"tensor_parallel": degrees.tensor, "pipeline_parallel": degrees.pipeline}
    (out / MANIFEST).write_text(json.dumps(manifest))
    return out


def test_max_of_a_partitioned_model_is_its_own_degree(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = partitioned(checkpoint("llama"), tmp_path / "out", Degrees(3, 2))
    assert [fitting_ranks(settings(out, tensor_parallel=size)) for size in (1, 8)] == [3, 3]
    most = {"registry_address": "none", "tensor_parallel": "max", "pipeline_parallel": "max"}
    assert DecodeSettings(model=str(out), **most).num_local_ranks == 6  # type: ignore[arg-type]
    monkeypatch.setattr("worker.settings.num_numa_nodes", lambda: 2)
    assert DecodeSettings(model=str(checkpoint("llama")), **most).num_local_ranks == 2  # type: ignore[arg-type]


def test_a_partitioned_model_is_not_loaded_with_dummy_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    out = partitioned(checkpoint("llama"), tmp_path / "out", Degrees())
    with pytest.raises(ConfigurationError, match="is partitioned, and load_format=dummy ignores weights"):
        load_model_runner(settings(out, load_format="dummy"))


@pytest.mark.parametrize(
    ("tensor", "pipeline", "eager", "degrees"),
    [
        ("1", "1", False, Degrees()),
        ("3", "2", False, Degrees(3, 2)),
        ("max", "max", False, Degrees(4)),
        ("max", "2", True, Degrees(1, 2)),
    ],
)
def test_a_worker_announces_its_ranks(
    compiled: Path, monkeypatch: pytest.MonkeyPatch, tensor: str, pipeline: str, eager: bool, degrees: Degrees
) -> None:
    monkeypatch.setattr("worker.settings.num_numa_nodes", lambda: 8)
    wanted: list[RunnerSettings] = []

    def load(runner_settings: RunnerSettings, on_progress: Progress | None) -> LoadedRunner:
        wanted.append(runner_settings)
        return load_model_runner(settings(compiled))

    limits = EngineLimits(max_batch_tokens=64, max_num_seqs=4)
    loaded = load_engine(
        DecodeSettings(
            model=str(compiled),
            registry_address="none",
            device="cpu",
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            enforce_eager=eager,
            kv_cache_bytes=8_000_000,
        ),
        limits,
        load=load,
    )
    assert [each.degrees for each in wanted] == [degrees]
    info = loaded.worker_info(WorkerRole.DECODE, limits)
    assert Degrees(info.tensor_parallel, info.pipeline_parallel) == degrees


@pytest.mark.parametrize("degree", ["0", "-1", "two", "1.5", ""])
def test_wrong_degrees_are_named(degree: str) -> None:
    for name in ("tensor_parallel", "pipeline_parallel"):
        with pytest.raises(ConfigurationError, match=f"{name} must be at least 1, or max, got '{degree}'"):
            DecodeSettings(model="m", registry_address="none", **{name: degree})
