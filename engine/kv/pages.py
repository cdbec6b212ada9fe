"""Pages of the KV cache on CPU, which are there before blocks are first used.

The system gives memory to a process page by page, at the first write to each, and clears it then: in 0.1 ms for a huge
page, on a virtual machine in up to 6. Each layer has its keys and its values in a place of their own, so that a new
block may be the first one in a hundred huge pages, and the step that writes to it would take 40 ms longer.
"""

import threading
import weakref
from queue import SimpleQueue

from engine.kv.sharded_cache import AnyKVCache

_AHEAD_BYTES = 32 << 20
_Blocks = tuple[AnyKVCache, int, int]


class PagesAhead:
    """Has the pages of the blocks that will be used next committed, in a thread of its own, which ends with this
    object. The process may end before all is committed.

    The thread has the priority of all others: while it holds the system's lock on the process's memory, they may have
    to wait for it.
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
