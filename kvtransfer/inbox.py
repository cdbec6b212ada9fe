"""Hands pushed ranges from the engine's thread to the event loop."""

import asyncio
import contextlib
from collections import deque

from kvtransfer.chunks import ChunkRange, PushQueue


class PushInbox:
    """Ranges are pushed on any thread. The event loop that created the inbox takes them, joined or cut to chunks."""

    def __init__(self, layer_block_bytes: int, max_bytes: int) -> None:
        self._arrived: deque[ChunkRange] = deque()  # appended by any thread, emptied by the loop
        self._queue = PushQueue(layer_block_bytes, max_bytes)
        self._changed = asyncio.Event()
        self._is_read_scheduled = False
        self._is_finished = False
        self._loop = asyncio.get_running_loop()

    def push(self, piece: ChunkRange) -> None:
        """Add `piece`. May be called on any thread; never blocks."""
        self._arrived.append(piece)
        if not self._is_read_scheduled:  # one wake-up for many pushes
            self._is_read_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is stopping
                self._loop.call_soon_threadsafe(self._read)

    def finish(self) -> None:
        """Declare that nothing more will be pushed."""
        self._is_finished = True
        self._read()

    async def wait(self) -> bool:
        """Return True once there is a range to take, False once the inbox is finished and empty."""
        while not self._queue:
            if self._is_finished:
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    def take(self) -> ChunkRange:
        """Take the range of the next chunk; `wait` must have returned True."""
        return self._queue.take()

    def _read(self) -> None:
        # The flag is reset first: a push during the loop below is then seen by it or schedules another read.
        self._is_read_scheduled = False
        while self._arrived:
            self._queue.add(self._arrived.popleft())
        self._changed.set()
