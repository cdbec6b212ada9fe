"""KV chunks as transfers copy them between a device and host memory, and how long something takes on a device."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine.kv.cache import KVCache
from mesh.domain.kv import KVLayout, KVSpan, Span

if TYPE_CHECKING:
    from kvtransfer.transports.arena import Arena

_REPEATS = 20
_SLOW = {"cuda": (8192, 8192), "cpu": (64, 64)}  # a product of such matrices lets the device be late


@contextmanager
def arena_of(num_bytes: int) -> "Iterator[Arena]":
    """A sender's shared memory. It belongs to an event loop."""
    from kvtransfer.transports.arena import Arena

    async def make() -> Arena:
        return Arena("/dev/shm", num_bytes)

    with asyncio.Runner() as runner:
        arena = runner.run(make())
        try:
            yield arena
        finally:
            arena.close()


@dataclass(frozen=True)
class Chunk:
    """As many blocks as a transfer copies at once, scattered, and their cache."""

    cache: KVCache
    ids: list[int]
    span: KVSpan

    @property
    def num_bytes(self) -> int:
        return self.cache.payload_bytes(len(self.ids), self.span)

    def places(self, arena: "Arena") -> list[memoryview]:
        """Two places in an arena."""
        return [arena.view(start, self.num_bytes) for start in (0, self.num_bytes)]

    def read_gb_s(self, out: bytearray | memoryview) -> float:
        read = partial(self.cache.read_blocks, self.ids, self.span, out)
        return gb_s(self.num_bytes, best_s(self.cache.tensor.device, read))

    def require_right_copies(self, out: memoryview) -> None:
        """Blocks that the device has yet to write go to the host; then into blocks that it has yet to clear."""
        cache, device = self.cache, self.cache.tensor.device
        ids, slow = torch.tensor(self.ids, device=device), torch.ones(_SLOW[device.type], device=device)
        layers = self.span.layers
        kv = torch.randn(layers.count, 2, len(self.ids), *cache.tensor.shape[3:], device=device).to(cache.tensor.dtype)
        wait_for(device)
        slow @ slow
        for layer in range(layers.first, layers.end):
            cache.layer(layer).index_copy_(1, ids, kv[layer - layers.first])
        cache.note_written(layers)
        cache.read_blocks(self.ids, self.span, out)
        if bytes(out) != kv.view(torch.uint8).cpu().numpy().tobytes():
            raise AssertionError("blocks were read before they were written")
        slow @ slow
        others = [block + 1 for block in self.ids]
        cache.clear_blocks(others)
        cache.write_blocks(others, self.span, out)
        if not torch.equal(cache.tensor[layers.first : layers.end, :, others], kv):
            raise AssertionError("blocks were written before they were cleared")


def chunk_on(device: torch.device) -> Chunk:
    num_layers, num_ids = (32, 64) if device.type == "cuda" else (2, 4)
    layout = KVLayout("m", num_layers, 8, 128, 16, "bfloat16")
    ids = list(range(0, 4 * num_ids, 4))
    random.Random(0).shuffle(ids)
    return Chunk(KVCache(layout, 4 * num_ids, device), ids, KVSpan(Span(0, 2), layout.whole.heads))


@dataclass
class Copied:
    gb_s: float = 0.0


@contextmanager
def copying(chunk: Chunk, places: list[memoryview]) -> Iterator[Copied]:
    """A thread for each place copies into it again and again. At the end: how much that was, per second."""
    stop, begun_s, copied = threading.Event(), time.perf_counter(), Copied()

    def copy(place: memoryview) -> int:
        num_bytes = 0
        while not stop.is_set():
            chunk.cache.read_blocks(chunk.ids, chunk.span, place)
            num_bytes += len(place)
        return num_bytes

    with ThreadPoolExecutor(len(places)) as threads:
        running = [threads.submit(copy, place) for place in places]
        try:
            yield copied
        finally:
            stop.set()
    copied.gb_s = gb_s(sum(each.result() for each in running), time.perf_counter() - begun_s)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_s(device: torch.device, run: Callable[[], object]) -> float:
    """The shortest time of several runs, each until the device has finished. The first compiles and is not counted."""
    times_s = []
    for _ in range(_REPEATS if device.type == "cuda" else 2):
        begun_s = time.perf_counter()
        run()
        wait_for(device)
        times_s.append(time.perf_counter() - begun_s)
    return min(times_s[1:])


def gb_s(num_bytes: int, seconds: float) -> float:
    return round(num_bytes / seconds / 1e9, 1)
