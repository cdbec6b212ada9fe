"""Tensor-parallel ranks as threads of one process: every result equals that of one rank, to the bit."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch

from engine.kv_memory import KVMemory, KVReservation
from engine.load import kv_layout, resolve
from engine.model_runner import ModelRunner
from engine.models.facts import ModelConfig
from engine.ranks.rank import Rank, execute, kv_bytes
from engine.ranks.shared import Command, SharedGroup, StepMemory
from tests.component.arms import load_arm, settings
from tests.component.parity import run_mixed

MAX_ROWS, MAX_BLOCKS = 256, 64
FAMILIES = ["llama", "llama-tied", "llama-biases", "qwen2", "qwen3", "mistral"]
ARITHMETIC = [{}, {"kv_dtype": "float16"}, {"quantize": "int8"}, {"quantize": "int8", "kv_dtype": "float32"}]


@contextmanager
def ranked_runner(model_dir: Path, size: int, **changes: object) -> Iterator[ModelRunner]:
    """A runner of `size` ranks, each but the first with a thread in place of its process."""
    torch.set_num_threads(1)
    resolved, config = resolve(settings(model_dir, **changes))
    assert isinstance(config, ModelConfig)
    memory = StepMemory(config, max_rows=MAX_ROWS, max_blocks=MAX_BLOCKS)
    queues: list[SimpleQueue[Command | None]] = [SimpleQueue() for _ in range(1, size)]

    def post(command: Command | None) -> None:
        for queue in queues:
            queue.put(command)

    groups = [SharedGroup(rank, size, memory, post if rank == 0 else None) for rank in range(size)]
    ranks = [Rank(resolved, config, group) for group in groups]
    num_blocks = resolved.num_blocks or 0
    kv = np.zeros(kv_bytes(kv_layout(config, resolved).block_bytes, num_blocks, size), np.uint8)
    caches = ranks[0].caches(num_blocks, kv)
    decoders = [rank.build(cache) for rank, cache in zip(ranks[1:], caches[1:], strict=True)]

    def serve(number: int) -> None:
        while (command := queues[number].get()) is not None:
            execute(decoders[number], groups[number + 1], command)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(size - 1)]
    for thread in threads:
        thread.start()
    try:
        yield ranks[0].lead(resolved, caches, KVReservation(torch.device("cpu"), KVMemory(), 0))
    finally:
        post(None)
        for thread in threads:
            thread.join(30)


@pytest.mark.parametrize("changes", ARITHMETIC, ids=lambda changes: "-".join(changes.values()) or "float32")
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_equal_one_rank(checkpoint: Callable[[str], Path], family: str, changes: dict[str, str]) -> None:
    model_dir = checkpoint(family)
    alone = load_arm(model_dir, "compiled", **changes)
    expected = run_mixed(alone)
    for size in range(2, min(4, alone.kv_cache.layout.num_kv_heads) + 1):
        with ranked_runner(model_dir, size, **changes) as runner:
            for run, theirs in zip(run_mixed(runner), expected, strict=True):
                assert run.tokens == theirs.tokens
                assert run.prompt_logprobs == theirs.prompt_logprobs
            whole = runner.kv_cache.layout.whole
            blocks = range(runner.kv_cache.num_blocks)
            ours, other = (bytearray(runner.kv_cache.payload_bytes(len(blocks), whole)) for _ in range(2))
            runner.kv_cache.read_blocks(blocks, whole, ours)
            alone.kv_cache.read_blocks(blocks, whole, other)
            assert ours == other
