"""The receiver's side of a conversation over a link: the thread that reads a chunk also writes it into the store."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from kvtransfer.messages import TransferChunk, request_from_bytes
from kvtransfer.transports.link import Call, Work
from mesh.tasks import call_on


class DirectWrites:
    """Writes the chunks of one conversation, in order, on the link's threads. If a write hangs, another thread reads
    on, and queues the chunks that it reads for the thread in the write. `accept` checks a chunk when it has been read;
    `write` writes it in its turn. An error of either ends the call.
    """

    def __init__(
        self, call: Call, accept: Callable[[TransferChunk], None], write: Callable[[TransferChunk], None]
    ) -> None:
        self._call = call
        self._accept = accept
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._changing = threading.Lock()
        self._queued: deque[TransferChunk] = deque()
        self._is_writing = False  # a thread takes what is queued
        self._waiting: asyncio.Event | None = None
        self._error: Exception | None = None
        call.take = self._take

    async def finish(self) -> None:
        """Wait until all chunks that have come are written. Raises the error with which a write has failed."""
        await self._written()
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        """Let nothing be written any more. Returns, or raises if cancelled, when no write is in flight."""
        self._is_open = False
        is_cancelled = False
        while self._is_writing:
            try:
                await self._written()
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError

    async def _written(self) -> None:
        with self._changing:
            if not self._is_writing:
                return
            waiting = self._waiting = asyncio.Event()
        await waiting.wait()

    def _take(self, body: bytes) -> Work | None:
        if not self._is_open:
            return _nothing
        try:
            chunk = request_from_bytes(body)
            if not isinstance(chunk, TransferChunk):
                return None
            self._accept(chunk)
        except Exception as error:
            self._fail(error)
            return _nothing
        with self._changing:
            self._queued.append(chunk)
            is_writing, self._is_writing = self._is_writing, True
        return _nothing if is_writing else self._write_queued

    def _write_queued(self) -> None:
        while (chunk := self._next()) is not None:
            try:
                self._write(chunk)
            except Exception as error:
                self._fail(error)

    def _next(self) -> TransferChunk | None:
        with self._changing:
            if self._queued and self._is_open:
                return self._queued.popleft()
            self._is_writing = False
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            call_on(self._loop, waiting.set)
        return None

    def _fail(self, error: Exception) -> None:
        self._is_open, self._error = False, error
        call_on(self._loop, self._call.fail, error)


def _nothing() -> None:
    return
