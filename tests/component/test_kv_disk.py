"""KV that came back from disk gives the same answers, to the bit, without computing the prompt again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.block_pool import BlockPool
from engine.kv_disk import BlockFiles, DiskCache
from engine.loop import Engine
from engine.model_runner import ModelRunner
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.settings import SchedulerConfig
from mesh.domain.tokens import SampledToken
from tests.component.arms import load_arm
from tests.fakes.requests import make_request

Checkpoint = Callable[[str], Path]

PROMPTS = {
    name: [(number * factor) % 250 for number in range(1, 121)] for name, factor in (("a", 7), ("b", 11), ("c", 13))
}


def engine_with_disk(runner: ModelRunner, folder: Path) -> tuple[Engine, DiskCache]:
    layout = runner.kv_cache.layout
    disk = DiskCache(BlockFiles(folder, repr(layout), layout.block_bytes, 1 << 30), runner.kv_cache)
    config = SchedulerConfig(layout.block_size, max_batch_tokens=64, max_num_seqs=2, max_model_len=160)
    return Engine(Scheduler(config, BlockPool(runner.kv_cache.num_blocks, disk.evicted), disk), runner), disk


def answer(engine: Engine, disk: DiskCache, name: str) -> tuple[SequenceState, list[SampledToken]]:
    sequence = SequenceState(make_request(name, PROMPTS[name[0]], max_new_tokens=12))
    sequence.from_disk = disk.fetch(engine.scheduler.missing(sequence)).result()
    engine.scheduler.add(sequence)
    tokens: list[SampledToken] = []
    while not (result := engine.step()).is_idle:
        tokens += [token for output in result.outputs for token in output.tokens]
    return sequence, tokens


@pytest.mark.parametrize(
    ("arm", "changes"),
    [("compiled", {}), ("compiled", {"quantize": "int8"}), ("torch", {"kv_dtype": "fp8", "block_size": 16})],
    ids=["fp32", "int8", "fp8"],
)
def test_answers_are_equal_to_the_bit(
    checkpoint: Checkpoint, tmp_path: Path, arm: str, changes: dict[str, object]
) -> None:
    runner = load_arm(checkpoint("llama"), arm, num_blocks=10, **changes)
    engine, disk = engine_with_disk(runner, tmp_path)
    _, alone = answer(engine, disk, "a")
    for other in ("b", "c"):  # together they take all blocks
        answer(engine, disk, other)
    disk.close()
    engine, disk = engine_with_disk(runner, tmp_path)  # as a worker that has started again
    runner.clear_blocks(list(range(10)))
    again, tokens = answer(engine, disk, "a again")
    assert again.num_cached_tokens == 112, "seven full blocks"
    assert tokens == alone
    assert engine.scheduler.load().computed_tokens == 120 - 112
    disk.close()
