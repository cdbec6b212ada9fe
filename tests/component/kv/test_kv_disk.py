"""KV that came back from disk gives the same answers, to the bit, without computing the prompt again."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decode_worker.settings import DecodeSettings
from engine.engine import Engine
from engine.kv.block_pool import BlockPool
from engine.kv.disk import BlockFiles, DiskCache
from engine.loading.load_runner import load_model_runner
from engine.loading.weights import Progress
from engine.model_runner import ModelRunner
from engine.runner_settings import RunnerSettings
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.settings import SchedulerConfig
from mesh.domain.errors import ConfigurationError
from mesh.domain.tokens import SampledToken
from tandem_cli.main import main
from tests.component.arms import load_arm
from tests.component.test_load import edit_weights
from tests.defects import Repaired
from tests.fakes.requests import make_request
from worker.load_engine import LoadedRunner, load_engine
from worker.runner_settings import EngineLimits

Checkpoint = Callable[[str], Path]

KEPT = bytes(32)

PROMPTS = {
    name: [(number * factor) % 250 for number in range(1, 121)] for name, factor in (("a", 7), ("b", 11), ("c", 13))
}


def engine_with_disk(runner: ModelRunner, folder: Path) -> tuple[Engine, DiskCache]:
    layout = runner.kv_cache.layout
    disk = DiskCache(BlockFiles(folder, repr(layout), layout.block_bytes, 1 << 30), runner.kv_cache)
    limits = {"max_batch_tokens": 64, "max_num_seqs": 2, "max_model_len": 160}
    facts = {"state_blocks": layout.state_blocks, "windows": layout.windows}
    config = SchedulerConfig(layout.block_size, **limits, **facts)
    return Engine(Scheduler(config, BlockPool(runner.kv_cache.num_blocks, disk.evicted), disk), runner), disk


def answer(engine: Engine, disk: DiskCache, name: str) -> tuple[SequenceState, list[SampledToken]]:
    sequence = SequenceState(make_request(name, PROMPTS[name[0]], max_new_tokens=12))
    sequence.from_disk = disk.fetch(engine.scheduler.tables.missing(sequence)).result()
    engine.scheduler.add(sequence)
    tokens: list[SampledToken] = []
    while not (result := engine.step()).is_idle:
        tokens += [token for output in result.outputs for token in output.tokens]
    return sequence, tokens


@pytest.mark.parametrize(
    ("family", "arm", "num_blocks", "changes"),
    [
        ("llama", "compiled", 10, {}),
        ("llama", "compiled", 10, {"quantize": "int8"}),
        ("llama", "torch", 10, {"kv_dtype": "fp8", "block_size": 16}),
        ("qwen3.5", "compiled", 24, {}),
        ("gemma2", "compiled", 30, {}),
    ],
    ids=["fp32", "int8", "fp8", "recurrent", "windows"],
)
def test_answers_are_equal_to_the_bit(
    checkpoint: Checkpoint, tmp_path: Path, family: str, arm: str, num_blocks: int, changes: dict[str, object]
) -> None:
    runner = load_arm(checkpoint(family), arm, num_blocks=num_blocks, **changes)
    engine, disk = engine_with_disk(runner, tmp_path)
    _, alone = answer(engine, disk, "a")
    for other in ("b", "c"):  # together they take all blocks
        answer(engine, disk, other)
    disk.close()
    engine, disk = engine_with_disk(runner, tmp_path)  # as a worker that has started again
    runner.clear_blocks(list(range(num_blocks)))
    again, tokens = answer(engine, disk, "a again")
    assert again.num_cached_tokens == 112, "seven full blocks"
    assert tokens == alone
    assert engine.scheduler.load().computed_tokens == 120 - 112
    disk.close()


def disk_of(model_dir: Path, folder: Path, **changes: Any) -> BlockFiles:
    """The disk of a worker that starts now."""
    settings = DecodeSettings(
        model=str(model_dir), registry_address="none", device="cpu", kv_disk=str(folder), kv_disk_gib=0.1, **changes
    )
    disk = load_engine(settings, EngineLimits(64, 4, max_kv_tokens=256)).kv_disk
    assert disk is not None
    disk.close()
    return disk._files


def test_workers_find_kv_of_the_same_weights_and_decoder_only(
    checkpoint: Checkpoint, tmp_path: Path, repaired: Repaired
) -> None:
    load_arm(checkpoint("llama"), "compiled")
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    before = disk_of(model_dir, tmp_path / "kv")
    payload = bytes(before._block_bytes)
    before.write(KEPT, payload)
    for path in model_dir.iterdir():
        os.utime(path, ns=(0, 0))
    assert disk_of(model_dir, tmp_path / "kv").read(KEPT) == payload, "downloaded anew"
    assert main(["partition", str(model_dir), str(tmp_path / "parts")]) == 0
    assert disk_of(tmp_path / "parts", tmp_path / "kv").read(KEPT) == payload, "a partition of these weights"
    assert disk_of(model_dir, tmp_path / "kv", enforce_eager=True).read(KEPT) is None
    # One row, which is not where the fingerprint looks.
    edit_weights(model_dir, lambda stored: stored["model.embed_tokens.weight"][3].add_(1.0))
    after = disk_of(model_dir, tmp_path / "kv")
    assert after._block_bytes == before._block_bytes
    assert after.read(KEPT) is None
    repaired("D43", "nothing is found: the folder's name has all bytes of the weights, and the decoder")


def test_weights_that_change_while_they_are_loaded_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    settings = DecodeSettings(model=str(model_dir), registry_address="none", device="cpu", kv_disk=str(tmp_path / "kv"))

    def load_and_edit(runner_settings: RunnerSettings, on_progress: Progress | None) -> LoadedRunner:
        runner = load_model_runner(runner_settings, on_progress)
        edit_weights(model_dir, lambda stored: stored["model.embed_tokens.weight"][3].add_(1.0))
        return runner

    with pytest.raises(ConfigurationError, match=r"model\.safetensors has changed while it was loaded"):
        load_engine(settings, EngineLimits(64, 4, max_kv_tokens=256), load=load_and_edit)
