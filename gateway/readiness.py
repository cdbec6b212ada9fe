"""Whether a router serves: for probes, which need no key and must have their answer soon."""

import asyncio
import time
from collections.abc import Callable

import tandem

_ANSWER_S = 1.0
_FRESH_S = 0.5


class Readiness:
    """Asks for the router's health, once for all who want to know at the same time."""

    def __init__(self, client: tandem.AsyncClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._asking: asyncio.Task[bool] | None = None
        self._known = False
        self._known_until_s = 0.0

    async def is_ready(self) -> bool:
        """True if a complete path of workers serves. Takes a second at most."""
        if self._clock() < self._known_until_s:
            return self._known
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    def forget(self) -> None:
        """Ask anew next time."""
        self._known_until_s = 0.0

    async def _ask(self) -> bool:
        try:
            await self._client.wait_ready(timeout=_ANSWER_S)
            self._known = True
        except tandem.TandemError:
            self._known = False
        self._known_until_s = self._clock() + _FRESH_S
        return self._known
