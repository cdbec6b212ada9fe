"""`tandem plan` counts the memory that workers take for LoRA adapters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.loading.memory_needs import enter_ledger
from engine.loading.resolve import resolve
from tandem_cli.main import main
from tests.component.arms import load_arm, settings
from tests.component.lora.adapters import read_adapters, write_adapter

Checkpoint = Callable[[str], Path]
_DEVICE = ("--memory", "1", "--bandwidth", "10", "--flops", "1", "--dtype", "float32")


@pytest.fixture
def folders(checkpoint: Checkpoint, tmp_path: Path) -> list[Path]:
    """Adapters of several sizes."""
    return [
        write_adapter(checkpoint("llama"), tmp_path / "adapters" / name, rank=rank, targets=targets)
        for name, rank, targets in (("a", 16, ""), ("b", 3, "[qv]_proj"), ("c", 20, "mlp"))
    ]


def plan(capsys: pytest.CaptureFixture[str], model_dir: Path, *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", "--json", str(model_dir), *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def reserved(model_dir: Path, **changes: object) -> int:
    """What a worker announces before it loads."""
    return enter_ledger(*resolve(settings(model_dir, **changes))).weights_bytes


def test_all_adapters(checkpoint: Checkpoint, folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    model_dir, adapters = checkpoint("llama"), read_adapters(*folders)
    own = reserved(model_dir, adapters=adapters) - reserved(model_dir)
    named = plan(capsys, model_dir, *_DEVICE, *(f"--adapter={folder.name}={folder}" for folder in folders))
    assert named["adapters"] == {"names": ["a", "b", "c"], "num_loaded": 3, "num_bytes": own}
    found = plan(capsys, model_dir, *_DEVICE, "--adapter", str(folders[0].parent))
    assert found["adapters"] == named["adapters"]
    alone = plan(capsys, model_dir, *_DEVICE)
    assert alone["adapters"] is None
    for row, without in zip(named["memory"], alone["memory"], strict=True):
        free = without["kv_tokens"] - row["kv_tokens"]
        assert free == pytest.approx(own / row["kv_bytes_per_token"], abs=1)


@pytest.mark.parametrize("slots", [1, 2])
def test_slots_have_room_for_any(
    checkpoint: Checkpoint, folders: list[Path], capsys: pytest.CaptureFixture[str], slots: int
) -> None:
    model_dir, adapters = checkpoint("llama"), read_adapters(*folders)
    runner = load_arm(model_dir, "compiled", adapters=adapters, max_loaded_adapters=slots)
    flags = ("--adapter", str(folders[0].parent), "--max-loaded-adapters", str(slots))
    found = plan(capsys, model_dir, *_DEVICE, *flags)["adapters"]
    assert found["num_bytes"] == runner.model._adapters.pieces.packed.nbytes  # type: ignore[attr-defined]
    assert found["num_bytes"] == reserved(model_dir, adapters=adapters, max_loaded_adapters=slots) - reserved(model_dir)


def test_ranks(
    checkpoint: Checkpoint, folders: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_cli.plan._capacity", _without_probe)
    model_dir, adapters = checkpoint("llama"), read_adapters(*folders)
    own = reserved(model_dir, adapters=adapters, tensor_parallel=2, pipeline_parallel=3) - reserved(model_dir)
    degrees = ("--tensor-parallel", "2", "--pipeline-parallel", "3")
    found = plan(capsys, model_dir, "--threads", "6", "--adapter", str(folders[0].parent), *degrees)
    assert found["adapters"]["num_bytes"] == own
    assert [rank["adapter_bytes"] for rank in found["ranks"]] == pytest.approx([own / 6] * 6)
    assert main(["plan", str(model_dir), "--threads", "6", "--adapter", str(folders[0].parent), *degrees]) == 0
    out = capsys.readouterr().out
    assert "adapters: 3 of 3 in memory at once, " in out
    assert "adapters bytes" in out


def _without_probe(args: Any, config: Any, precision: Any, num_devices: int) -> Any:
    from tandem_cli.capacity.model_size import model_size
    from tandem_cli.capacity.roofline import Capacity, Device

    device = Device("here", 1e9, 1e10, {precision.weights: 1e12, precision.kv: 1e12}, "a test")
    return Capacity(model_size(config), precision, device.rates(precision), args.memory_share), device


def test_an_adapter_that_does_not_fit_is_refused(
    checkpoint: Checkpoint, folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(checkpoint("qwen3")), *_DEVICE, f"--adapter=mine={folders[0]}"]) == 2
    assert "adapter mine: " in capsys.readouterr().err
