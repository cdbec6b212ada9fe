"""PageCommitter: has the system commit the memory pages of KV blocks on CPU before the blocks are first used.

The system gives memory to a process page by page, at the first write to each, and clears it then: in 0.1 ms for a huge
page, on a virtual machine in up to 6. Keys and values of each layer lie apart, so the first write to a block may need a
hundred new huge pages, which would add 40 ms to a step.
"""

import threading
import weakref
from queue import SimpleQueue

from engine.kv.sharded_cache import AnyKVCache

_AHEAD_BYTES = 32 << 20
_Blocks = tuple[AnyKVCache, int, int]


class PageCommitter:
    """Commits the pages of the blocks that will be used next, in a thread that ends with this object. The process may
    end before all are committed.

    The thread keeps the normal priority, because others may wait for it: it holds the system's lock on the process's
    memory.
    """

    def __init__(self, cache: AnyKVCache, ahead_bytes: int = _AHEAD_BYTES) -> None:
        self._cache = cache
        self._step = max(1, ahead_bytes // cache.layout.block_bytes)  # blocks
        self._end = 0  # of the blocks that are committed, or will be
        self._wanted: SimpleQueue[_Blocks | None] = SimpleQueue()
        try:
            threading.Thread(target=_commit, args=(self._wanted,), name="kv-pages", daemon=True).start()
        except RuntimeError:  # the system has no thread for it: pages come when they are written
            self._end = cache.num_blocks
        weakref.finalize(self, self._wanted.put, None).atexit = False
        self.use(0)

    def use(self, block_id: int) -> None:
        """Announce that a block is used for the first time. Blocks come in ascending order."""
        while block_id + self._step >= self._end < self._cache.num_blocks:
            first, self._end = self._end, min(self._end + self._step, self._cache.num_blocks)
            self._wanted.put((self._cache, first, self._end))


def _commit(wanted: "SimpleQueue[_Blocks | None]") -> None:
    """Runs on the thread. While it waits it holds no cache, so that its memory is freed with the engine."""
    while (blocks := wanted.get()) is not None:
        cache, first, end = blocks
        cache.commit_blocks(first, end)
        del blocks, cache
