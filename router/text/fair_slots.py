"""FairSlots: turns at the threads that process text, where a long text takes a second.

Concurrency is bounded, tenants take turns as in the queue for workers, and the characters that wait are bounded. A
named tenant may have as many waiting as there are free, so that one tenant alone fills half and others still find
capacity.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from mesh.domain.errors import Overloaded
from router.admission.fair_queue import FairQueue, QueueEntry

T = TypeVar("T")

# Eight of the largest messages that the public port accepts.
MAX_WAITING_CHARS = 32 << 20


@dataclass(eq=False, slots=True)
class _Waiter:
    tenant: str
    num_chars: int
    turn: asyncio.Future[None]


class FairSlots:
    """Slots for work on text, for which tenants take turns. Used by one event loop."""

    def __init__(self, num_slots: int, *, max_waiting_chars: int = MAX_WAITING_CHARS) -> None:
        self._num_free = num_slots
        self._max_waiting_chars = max_waiting_chars
        self._waiters: FairQueue[_Waiter] = FairQueue()
        self._chars: Counter[str] = Counter()  # waiting characters, by tenant

    async def run(self, call: Callable[[], Awaitable[T]], *, tenant: str = "", num_chars: int = 0) -> T:
        """Run `call` once a slot is free, and return its result. Raises Overloaded if too many characters wait.

        Cancelling the caller does not interrupt a running call, which keeps its slot until it is done.
        """
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(tenant, num_chars)
        running = asyncio.ensure_future(call())
        running.add_done_callback(self._done)
        return await asyncio.shield(running)

    async def _wait(self, tenant: str, num_chars: int) -> None:
        self._require_capacity(tenant, num_chars)
        waiter = _Waiter(tenant, num_chars, asyncio.get_running_loop().create_future())
        self._waiters.add(QueueEntry(tenant), waiter)
        self._chars[tenant] += num_chars
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if not self._waiters.remove(waiter) and not waiter.turn.cancelled():
                self._pass_on()  # the slot was already granted
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
        if not running.cancelled():
            running.exception()  # retrieved, in case the caller was cancelled
        self._pass_on()

    def _pass_on(self) -> None:
        """Give the slot to the head of the queue, or free it."""
        while self._waiters:
            waiter = self._waiters.take_first()
            if not waiter.turn.done():
                waiter.turn.set_result(None)
                return
        self._num_free += 1
