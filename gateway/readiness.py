"""The router's health, cached for health checks, which need no key and expect an answer within a second."""

import asyncio
import time
from collections.abc import Callable

import tandem

_TIMEOUT_S = 1.0
_FRESH_S = 0.5


class Readiness:
    """Queries the router's health. Concurrent callers share one query."""

    def __init__(self, client: tandem.AsyncClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._query: asyncio.Task[bool] | None = None
        self._is_ready = False
        self._fresh_until_s = 0.0

    async def is_ready(self) -> bool:
        """True if the router and at least one complete path of workers serve. Answers within a second."""
        if self._clock() < self._fresh_until_s:
            return self._is_ready
        if self._query is None or self._query.done():
            self._query = asyncio.create_task(self._query_router())
        return await asyncio.shield(self._query)

    def forget(self) -> None:
        """Discard the cached answer."""
        self._fresh_until_s = 0.0

    async def _query_router(self) -> bool:
        try:
            await self._client.wait_ready(timeout=_TIMEOUT_S)
            self._is_ready = True
        except tandem.TandemError:
            self._is_ready = False
        self._fresh_until_s = self._clock() + _FRESH_S
        return self._is_ready
