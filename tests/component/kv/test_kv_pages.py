"""Pages of the KV cache are committed before blocks are first used, and no more of them than that needs."""

import ctypes
import mmap
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from engine.kv.block_pool import BlockPool
from engine.kv.cache import KVCache
from engine.kv.page_commits import PageCommitter
from engine.memory import commit_pages
from mesh.domain.kv import KVLayout
from tests.waiting import until

LAYOUT = KVLayout("model", num_layers=2, num_kv_heads=4, head_dim=64, block_size=16, dtype="float32")
NUM_BLOCKS = 1024
AHEAD = 64
IN_HUGE_PAGE = (2 << 20) // (LAYOUT.block_bytes // 4)  # blocks, of the keys or values of one layer


def resident(cache: KVCache, first: int, end: int) -> list[float]:
    """The committed part of these blocks, for the keys and for the values of each layer."""
    shares = []
    for plane in cache.tensor.flatten(0, 1):
        blocks = plane[first:end]
        flags = (ctypes.c_ubyte * (blocks.nbytes // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(blocks.data_ptr()), ctypes.c_size_t(blocks.nbytes), flags) == 0
        shares.append(sum(flag & 1 for flag in flags) / len(flags))
    return shares


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are there")
async def test_blocks_are_committed_before_they_are_used() -> None:
    cache = KVCache(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
    if not commit_pages(cache.layer(0)[0, :1]):
        pytest.skip("this system commits no pages on demand")
    pool = BlockPool(NUM_BLOCKS, on_first_use=PageCommitter(cache, AHEAD * LAYOUT.block_bytes).use)
    for count in (0, 200, 400):
        taken = pool.allocate(count) or []
        cache.tensor[:, :, taken] = 7.0
        used = NUM_BLOCKS - pool.num_free
        await until(lambda end=used + AHEAD: resident(cache, 0, end) == [1.0] * 4)
        assert (cache.tensor[:, :, taken] == 7.0).all()
        assert resident(cache, used + 2 * AHEAD + IN_HUGE_PAGE, NUM_BLOCKS) == [0.0] * 4


def test_blocks_are_used_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool = BlockPool(NUM_BLOCKS, on_first_use=PageCommitter(KVCache(LAYOUT, NUM_BLOCKS, torch.device("cpu"))).use)
    assert pool.allocate(NUM_BLOCKS) == list(range(NUM_BLOCKS))


def test_pages_that_are_not_committed_yet_keep_no_process() -> None:
    script = """
import threading, torch
from engine.kv.cache import KVCache
from engine.kv.page_commits import PageCommitter
from tests.component.kv.test_kv_pages import LAYOUT, NUM_BLOCKS

begun = threading.Event()

class Hanging(KVCache):
    def commit_blocks(self, first, end):
        begun.set()
        threading.Event().wait()

ahead = PageCommitter(Hanging(LAYOUT, NUM_BLOCKS, torch.device("cpu")))
ahead.use(NUM_BLOCKS - 1)
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=240, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


async def test_the_thread_and_the_cache_end_with_the_engine() -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "kv-pages"}

    before = threads()
    cache = KVCache(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
    pool = BlockPool(NUM_BLOCKS, on_first_use=PageCommitter(cache).use)
    pool.allocate(NUM_BLOCKS)
    assert len(threads() - before) == 1
    memory = weakref.ref(cache)
    del cache, pool
    await until(lambda: threads() == before and memory() is None)
