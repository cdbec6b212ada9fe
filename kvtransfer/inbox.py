"""What the engine's thread has pushed, on its way to the event loop."""

import asyncio
import contextlib
from collections import deque

from kvtransfer.chunks import ChunkRange, PushQueue
from mesh.domain.kv import KVLayout


class PushInbox:
    """Pushes come in from any thread and are taken, joined or cut to chunks, on the event loop that made the inbox."""

    def __init__(self, layout: KVLayout, max_bytes: int) -> None:
        self._arrived: deque[ChunkRange] = deque()  # appended by any thread, emptied by the loop
        self._queue = PushQueue(layout, max_bytes)
        self._news = asyncio.Event()
        self._is_news_due = False
        self._is_finished = False
        self._loop = asyncio.get_running_loop()

    def push(self, piece: ChunkRange) -> None:
        """Any thread; never blocks."""
        self._arrived.append(piece)
        if not self._is_news_due:  # one wake-up for many pushes
            self._is_news_due = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is stopping
                self._loop.call_soon_threadsafe(self._read)

    def finish(self) -> None:
        """Nothing will be pushed after what has been."""
        self._is_finished = True
        self._read()

    async def wait(self) -> bool:
        """True once there is something to take, False if it is finished and all has been taken."""
        while not self._queue:
            if self._is_finished:
                return False
            self._news.clear()
            await self._news.wait()
        return True

    def take(self) -> ChunkRange:
        """The next chunk's range; there must be one."""
        return self._queue.take()

    def _read(self) -> None:
        # The flag first: a push during the loop below is then either seen by it or wakes the loop again.
        self._is_news_due = False
        while self._arrived:
            self._queue.add(self._arrived.popleft())
        self._news.set()
