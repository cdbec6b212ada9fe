"""Clients that take nothing are cut off."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Message, Send


class _Watch:
    """Looks now and then how long the current message has been waiting: one timer for a response, not one for each
    token."""

    def __init__(self, send: Send, limit_s: float, timeout: asyncio.Timeout) -> None:
        self._send = send
        self._limit_s = limit_s
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None
        self.timer = self._loop.call_later(limit_s, self._look)

    async def send(self, message: Message) -> None:
        """Send on."""
        self._since_s = self._loop.time()
        await self._send(message)
        self._since_s = None

    def _look(self) -> None:
        now_s = self._loop.time()
        left_s = self._limit_s if self._since_s is None else self._since_s + self._limit_s - now_s
        if left_s <= 0:
            self._timeout.reschedule(now_s)
        else:
            self.timer = self._loop.call_later(left_s, self._look)


@asynccontextmanager
async def impatient(send: Send, limit_s: float) -> AsyncIterator[Send]:
    """Yields a `send`; the block ends with TimeoutError once a message has waited for `limit_s`."""
    async with asyncio.timeout(None) as timeout:
        watch = _Watch(send, limit_s, timeout)
        try:
            yield watch.send
        finally:
            watch.timer.cancel()
