"""How long a sender waits for its receiver."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvtransfer.settings import TransferSettings
from mesh.domain.errors import TransferFailed


class Watchdog:
    """Ends what it watches with TransferFailed when the receiver is silent for a lease, or stuck.

    Silent: no message has come for `lease_s`. A living receiver is never that quiet, because it answers renewals.
    Stuck: it is alive, but has owed an answer to a chunk or to the commit for `progress_timeout_s`.
    """

    def __init__(self, settings: TransferSettings) -> None:
        self._lease_s = settings.lease_s
        self._progress_timeout_s = settings.progress_timeout_s
        self._clock = asyncio.get_running_loop().time
        self._heard_at = self._progress_at = self._clock()
        self._num_owed = 0
        self._timeout = asyncio.timeout(self._lease_s)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Around the whole conversation."""
        try:
            async with self._timeout:
                yield
        except TimeoutError:
            silent_s = self._clock() - self._heard_at
            if silent_s >= self._lease_s:
                raise TransferFailed(f"nothing has come from the receiver for {self._lease_s:g} s") from None
            raise TransferFailed(f"the receiver has not answered for {self._progress_timeout_s:g} s") from None

    def heard(self) -> None:
        """A message has come from the receiver."""
        self._heard_at = self._clock()
        self._restart()

    def asked(self) -> None:
        """The receiver owes one more answer."""
        self._num_owed += 1
        if self._num_owed == 1:
            self._progress_at = self._clock()
            self._restart()

    def answered(self) -> None:
        """It owes one less; its time for the others begins anew."""
        self._num_owed -= 1
        self._progress_at = self._clock()
        self._restart()

    def _restart(self) -> None:
        if self._timeout.expired():
            return
        silent_at = self._heard_at + self._lease_s
        stuck_at = self._progress_at + self._progress_timeout_s
        self._timeout.reschedule(min(silent_at, stuck_at) if self._num_owed else silent_at)
