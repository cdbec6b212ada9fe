"""A group of ranks as threads of one process, in place of the processes of `engine.ranks.launch`.

    python -m tests.component.ranks.ranked MODEL_DIR [ADAPTER]

prints the tokens of `parity.run_mixed` by two processes; with an adapter, those of `adapters.run_together`.
"""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from torch import distributed

from engine.kv.budget import KVMemoryShare
from engine.kv.sharded_cache import ShardedKVCache
from engine.loading.resolve import kv_layout, resolve
from engine.model_runner import ModelRunner
from engine.models.model_config import ModelConfig
from engine.ranks.commands import Command, Report
from engine.ranks.launch import load_ranked_runner
from engine.ranks.rank import Rank, kv_bytes
from engine.ranks.shared import SharedGroup, StepMemory
from engine.settings import KVMemorySettings
from mesh.domain.kv import Degrees
from mesh.logs import configure_logging
from tests.component.arms import settings
from tests.component.lora.adapters import read_adapters, run_together
from tests.component.parity import run_mixed

MAX_ROWS, MAX_BLOCKS = 256, 64


@contextmanager
def ranked_runner(model_dir: Path, degrees: Degrees, **changes: object) -> Iterator[ModelRunner]:
    """A runner over the ranks of `degrees`, each but the first with a thread in place of its process."""
    torch.set_num_threads(1)
    divided = {"tensor_parallel": degrees.tensor, "pipeline_parallel": degrees.pipeline}
    resolved, config = resolve(settings(model_dir, **divided | changes))
    assert isinstance(config, ModelConfig)
    adapter_rank = max((adapter.rank for adapter in resolved.adapters), default=0)
    layout = kv_layout(config, resolved)
    sizes = {"num_stages": degrees.pipeline, "num_groups": layout.groups.count, "adapter_rank": adapter_rank}
    memory = StepMemory(config, max_rows=MAX_ROWS, max_blocks=MAX_BLOCKS, **sizes)
    queues: list[SimpleQueue[Command | None]] = [SimpleQueue() for _ in range(degrees.num_ranks)]
    reports: SimpleQueue[Report] = SimpleQueue()

    def post(sender: int, stage: int, command: Command) -> None:
        for rank in range(stage * degrees.tensor, (stage + 1) * degrees.tensor):
            if rank != sender:
                queues[rank].put(command)

    groups = [
        SharedGroup(rank, degrees, memory, partial(post, rank), reports.put, reports.get)
        for rank in range(degrees.num_ranks)
    ]
    store = distributed.HashStore()
    ranks = [Rank(resolved, config, group, store) for group in groups]
    num_blocks = resolved.num_blocks or 0
    num_bytes = kv_bytes(layout.block_bytes, num_blocks, degrees.num_ranks)
    caches = ranks[0].caches(num_blocks, np.zeros(num_bytes, np.uint8))

    def serve(rank: int) -> None:
        ranks[rank].connect()
        execute = ranks[rank].follow(caches[rank])
        while (command := queues[rank].get()) is not None:
            execute(command)

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(1, degrees.num_ranks)]
    for thread in threads:
        thread.start()
    try:
        ranks[0].connect()
        memory_share = KVMemoryShare(torch.device("cpu"), KVMemorySettings(), 0)
        yield ranks[0].lead(caches[0], ShardedKVCache(caches[0], caches[1:], memory_share))
    finally:
        for queue in queues:
            queue.put(None)
        for thread in threads:
            thread.join(30)


def main(model_dir: Path, *folders: Path) -> None:
    configure_logging("ranked", level="critical")
    adapters = read_adapters(*folders)
    wanted = settings(model_dir, tensor_parallel=2, enforce_eager=not adapters, adapters=adapters)
    runner = load_ranked_runner(wanted, on_lost=sys.exit, log_level="critical")
    digests = ["", *(adapter.digest for adapter in adapters)]
    runs = run_together(runner, dict(enumerate(digests))) if adapters else run_mixed(runner)
    sys.stdout.write(json.dumps([run.token_ids for run in runs]) + "\n")
    runner.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
