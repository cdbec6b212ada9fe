"""The receiver's side of a conversation over a link: chunks that the thread writes which reads them."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from kvtransfer.messages import Chunk, request_from_bytes
from kvtransfer.transports.link import Call


class DirectWrites:
    """Chunks of one conversation over a link, each written by the thread that reads it. `write` does so, and raises."""

    def __init__(self, call: Call, write: Callable[[Chunk], None]) -> None:
        self._call = call
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._writing = threading.Lock()
        self._is_idle = asyncio.Event()
        self._error: Exception | None = None
        call.take = self._take

    def require_good(self) -> None:
        """Raise the error with which a write has failed."""
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        """Let nothing be written any more. Returns, or raises if cancelled, when no write is in flight."""
        self._is_open = False
        is_cancelled = False
        while self._writing.locked():
            try:
                await self._is_idle.wait()
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError

    def _take(self, body: bytes) -> bool:
        if not self._is_open:
            return True
        with self._writing:
            is_chunk = self._write_if_chunk(body)
        if not self._is_open:
            self._on_loop(self._is_idle.set)
        return is_chunk

    def _write_if_chunk(self, body: bytes) -> bool:
        try:
            request = request_from_bytes(body)
            if isinstance(request, Chunk) and self._is_open:
                self._write(request)
        except Exception as error:
            self._is_open, self._error = False, error
            self._on_loop(self._call.fail, error)
            return True
        return isinstance(request, Chunk)

    def _on_loop(self, callback: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process is stopping
            self._loop.call_soon_threadsafe(callback, *args)
