"""Ranks that share no memory as threads of one process: `load_remote_runner` over them, without processes and gRPC."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import distributed

from engine.kv.cache import KVCache
from engine.model_runner import ModelRunner
from engine.ranks.messages import BlockCopy, OnLost, StepMessage
from engine.ranks.remote import OwnMemoryRank, load_remote_runner
from engine.runner_settings import RunnerSettings
from mesh.domain.kv import Degrees, KVLayout
from tests.component.arms import settings
from tests.waiting import LIMIT_S


class ThreadRanks:
    """The ranks from 1 on. Implements engine.ranks.remote.RemoteRanks. `changes`: settings that they have and
    the leader has not.
    """

    def __init__(self, **changes: Any) -> None:
        self._changes = changes
        self.store = distributed.HashStore()
        self.caches: dict[int, KVCache] = {}
        self._threads: list[threading.Thread] = []
        self._messages: list[SimpleQueue[int | StepMessage | BlockCopy | None]] = []
        self._reports: SimpleQueue[int] = SimpleQueue()

    def gather(self, settings: RunnerSettings, layout: KVLayout) -> str:
        settings = replace(settings, **self._changes)
        for rank in range(1, settings.degrees.num_ranks):
            self._messages.append(SimpleQueue())
            self._threads.append(threading.Thread(target=self._serve, args=(settings, rank), daemon=True))
            self._threads[-1].start()
        return "127.0.0.1"

    def wait_loaded(self) -> list[int]:
        return [self._reports.get(timeout=LIMIT_S) for _ in self._threads]

    def allocate(self, num_blocks: int) -> None:
        for messages in self._messages:
            messages.put(num_blocks)

    def wait_ready(self) -> None:
        self.wait_loaded()

    def post(self, message: StepMessage | BlockCopy) -> None:
        for messages in self._messages:
            messages.put(message)

    def clear_blocks(self, block_ids: Sequence[int], first_token: int = 0) -> None:
        for cache in self.caches.values():
            cache.clear_blocks(block_ids, first_token)

    def watch(self, on_lost: OnLost) -> None:
        pass

    def close(self) -> None:
        for messages in self._messages:
            messages.put(None)
        for thread in self._threads:
            thread.join(LIMIT_S)

    def _serve(self, settings: RunnerSettings, rank: int) -> None:
        own, messages = OwnMemoryRank(settings, rank, self.store), self._messages[rank - 1]
        self._reports.put(own.fitting_blocks())
        num_blocks = messages.get()
        assert isinstance(num_blocks, int)
        self.caches[rank] = own.allocate(num_blocks)
        own.rank.connect(shares_memory=False)
        execute = own.executing(self.caches[rank])
        self._reports.put(num_blocks)
        while (message := messages.get()) is not None:
            assert not isinstance(message, int)
            execute(message)


@contextmanager
def own_memory_runner(
    model_dir: Path, degrees: Degrees, ranks: ThreadRanks | None = None, **changes: object
) -> Iterator[tuple[ModelRunner, ThreadRanks]]:
    torch.set_num_threads(1)
    wanted = settings(
        model_dir, tensor_parallel=degrees.tensor, pipeline_parallel=degrees.pipeline, max_batch_tokens=256, **changes
    )
    ranks = ranks or ThreadRanks()
    with closing(load_remote_runner(wanted, ranks, on_lost=pytest.fail)) as runner:
        yield runner, ranks
