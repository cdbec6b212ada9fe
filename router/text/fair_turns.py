"""FairTurns: turns at a thread that processes text, where a long text takes a second.

Tenants take turns as in the queue for workers, and the characters that wait are bounded. A named tenant may have as
many waiting as there are free, so that one tenant alone fills half and others still find capacity.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from mesh.domain.errors import Overloaded
from mesh.tasks import mark_retrieved
from router.admission.fair_queue import FairQueue, QueueEntry

T = TypeVar("T")

# Eight of the largest messages that the public port accepts.
MAX_WAITING_CHARS = 32 << 20


class FairTurns:
    """Runs one piece of work on text at a time; tenants take turns. Used by one event loop."""

    def __init__(self, *, max_waiting_chars: int = MAX_WAITING_CHARS) -> None:
        self._is_free = True
        self._max_waiting_chars = max_waiting_chars
        self._waiters: FairQueue[asyncio.Future[None]] = FairQueue()
        self._chars: Counter[str] = Counter()  # waiting characters, by tenant

    async def run(self, call: Callable[[], Awaitable[T]], *, tenant: str = "", num_chars: int = 0) -> T:
        """Run `call` when its turn has come, and return its result. Raises Overloaded if too many characters wait.

        Cancelling the caller does not interrupt a running call, whose turn lasts until it is done.
        """
        if self._is_free:
            self._is_free = False
        else:
            await self._wait(tenant, num_chars)
        try:
            running = asyncio.ensure_future(call())
        except BaseException:  # such as that of a system that has no thread for it
            self._pass_on()
            raise
        running.add_done_callback(self._done)
        return await asyncio.shield(running)

    async def _wait(self, tenant: str, num_chars: int) -> None:
        self._require_capacity(tenant, num_chars)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(QueueEntry(tenant), turn)
        self._chars[tenant] += num_chars
        try:
            await turn
        except asyncio.CancelledError:
            if not self._waiters.remove(turn) and not turn.cancelled():
                self._pass_on()  # the turn was already granted
            raise
        finally:
            self._chars[tenant] -= num_chars
            if not self._chars[tenant]:
                del self._chars[tenant]

    def _require_capacity(self, tenant: str, num_chars: int) -> None:
        free = self._max_waiting_chars - self._chars.total()
        if num_chars > free:
            raise Overloaded(f"texts of {self._chars.total()} characters are waiting already; try again later")
        if num_chars and tenant and self._chars[tenant] + num_chars > free:
            raise Overloaded(f"{self._chars[tenant]} characters of your texts are waiting already; try again later")

    def _done(self, running: "asyncio.Future[T]") -> None:
        mark_retrieved(running)  # in case the caller was cancelled
        self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to the head of the queue, if any is waiting."""
        while self._waiters:
            turn = self._waiters.take_first()
            if not turn.done():
                turn.set_result(None)
                return
        self._is_free = True
