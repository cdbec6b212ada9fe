"""The queue for workers: attempts wait here, in order, until a prefill and a decode worker have room.

    place() ─▶ waiters (tenants in turn, FIFO; replays at the front) ──pump: room for the first?──▶ Booking
                  │ cancelled, out of time: leaves at once
                  │ no decode worker at all for `no_worker_timeout_s`: NoWorkers

A pump runs after anything that can make room: a heartbeat, a worker joining, finished work. Only the first waiter is
tried, so that big requests are not overtaken for ever.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from mesh.domain.errors import InvalidRequest, NoWorkers, Overloaded
from router.ledger import Booking, Ledger
from router.placement import NoPlacement, Placement, PlacementQuery, Snapshot, place
from router.turns import Turns


@dataclass(eq=False, slots=True)
class _Waiter:
    query: PlacementQuery
    booking: asyncio.Future[Booking]


class _Outage:
    """Since when there has been no decode worker at all. `patience_s` later it is `accepted`."""

    def __init__(self, patience_s: float, on_accepted: Callable[[], None]) -> None:
        self.patience_s = patience_s
        self.accepted = False
        self._on_accepted = on_accepted
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """There is no decode worker."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.patience_s, self._accept)

    def end(self) -> None:
        """There is one."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.accepted = None, False

    def _accept(self) -> None:
        self.accepted = True
        self._on_accepted()


class PlacementQueue:
    """Used by one event loop. `snapshot` gives the mesh as it is now."""

    def __init__(
        self, ledger: Ledger, snapshot: Callable[[], Snapshot], *, max_queued: int, no_worker_timeout_s: float
    ) -> None:
        self._ledger = ledger
        self._snapshot = snapshot
        self._max_queued = max_queued
        self._waiters: Turns[_Waiter] = Turns()
        self._pump_scheduled = False
        self._outage = _Outage(no_worker_timeout_s, self._pump)

    @property
    def num_queued(self) -> int:
        """Attempts waiting."""
        return len(self._waiters)

    async def place(self, query: PlacementQuery, *, is_replay: bool = False) -> Booking:
        """Wait for room. The caller owns the booking.

        Raises Overloaded if the queue is full (never for a replay, which goes to the front), NoWorkers, InvalidRequest
        if the request can never fit. When cancelled, nothing stays behind.
        """
        if not is_replay and len(self._waiters) >= self._max_queued:
            raise Overloaded(f"{len(self._waiters)} requests are waiting already; try again later")
        waiter = _Waiter(query, asyncio.get_running_loop().create_future())
        if is_replay:
            self._waiters.add_first(waiter)
        else:
            self._waiters.add(query.tenant, waiter)
        self._pump()
        try:
            return await waiter.booking
        except asyncio.CancelledError:
            self._forget(waiter)
            raise

    def wake(self) -> None:
        """Something has changed: try again soon. Many calls in a row cost one try."""
        if self._waiters and not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def close(self) -> None:
        """Stop the timer."""
        self._outage.end()

    def _forget(self, waiter: _Waiter) -> None:
        """The caller has left: leave the queue, or give back what came too late."""
        if self._waiters.remove(waiter):
            self.wake()
        elif waiter.booking.done() and not waiter.booking.cancelled() and waiter.booking.exception() is None:
            waiter.booking.result().release()

    def _pump(self) -> None:
        """Place waiters from the front for as long as there is room."""
        self._pump_scheduled = False
        while self._waiters:
            waiter = self._waiters.first()
            placed = place(waiter.query, self._snapshot())
            self._watch_outage(placed)
            if not isinstance(placed, Placement) and self._is_worth_waiting(placed):
                return
            self._waiters.take_first()
            if not waiter.booking.done():
                self._answer(waiter, placed)

    def _watch_outage(self, placed: Placement | NoPlacement) -> None:
        if placed is NoPlacement.NO_DECODE_WORKER:
            self._outage.begin()
        else:
            self._outage.end()

    def _is_worth_waiting(self, why_not: NoPlacement) -> bool:
        if why_not is NoPlacement.NO_DECODE_WORKER:
            return not self._outage.accepted
        return why_not is NoPlacement.NO_ROOM

    def _answer(self, waiter: _Waiter, placed: Placement | NoPlacement) -> None:
        if isinstance(placed, Placement):
            waiter.booking.set_result(self._ledger.book(placed, waiter.query.num_tokens))
        elif placed is NoPlacement.TOO_LARGE:
            total = waiter.query.max_total_tokens
            waiter.booking.set_exception(InvalidRequest(f"no worker can hold a sequence of {total} tokens"))
        else:
            waiter.booking.set_exception(
                NoWorkers(f"no decode worker has been there for {self._outage.patience_s:g} s; try again later")
            )
