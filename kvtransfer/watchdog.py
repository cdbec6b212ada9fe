"""Timeouts of a sender that waits for its receiver."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvtransfer.settings import TransferSettings
from mesh.domain.errors import TransferFailed


class Watchdog:
    """Ends a conversation with TransferFailed if the receiver is silent or stuck.

    Silent: no message has arrived for `lease_s`. A live receiver is never silent, because it confirms renewals.
    Stuck: the receiver is alive but has not answered a chunk or the commit for `progress_timeout_s`.
    """

    def __init__(self, settings: TransferSettings) -> None:
        self._lease_s = settings.lease_s
        self._progress_timeout_s = settings.progress_timeout_s
        self._clock = asyncio.get_running_loop().time
        self._heard_at = self._progress_at = self._clock()
        self._num_unanswered = 0
        self._timeout = asyncio.timeout(self._lease_s)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Watch while the block, the whole conversation, runs. Raises TransferFailed."""
        try:
            async with self._timeout:
                yield
        except TimeoutError:
            silent_s = self._clock() - self._heard_at
            if silent_s >= self._lease_s:
                raise TransferFailed(f"the receiver has sent nothing for {self._lease_s:g} s") from None
            raise TransferFailed(f"the receiver has not answered for {self._progress_timeout_s:g} s") from None

    def on_message(self) -> None:
        """Note that a message has come from the receiver."""
        self._heard_at = self._clock()
        self._restart()

    def on_request(self) -> None:
        """Note that the receiver must answer one more request (a chunk or the commit)."""
        self._num_unanswered += 1
        if self._num_unanswered == 1:
            self._progress_at = self._clock()
            self._restart()

    def on_answer(self) -> None:
        """Note that the receiver has answered a request. The timeout for the remaining ones starts anew."""
        self._num_unanswered -= 1
        self._progress_at = self._clock()
        self._restart()

    def _restart(self) -> None:
        if self._timeout.expired():
            return
        silent_at = self._heard_at + self._lease_s
        stuck_at = self._progress_at + self._progress_timeout_s
        self._timeout.reschedule(min(silent_at, stuck_at) if self._num_unanswered else silent_at)
