"""The queue for workers: attempts wait here, in order, until a prefill and a decode worker have room.

    place() ─▶ waiters (in the order of router/turns.py; replays at the front) ──pump: room for the first?──▶ Booking
       │          │ cancelled, out of time: leaves at once
       │          │ its first token cannot come in time any more: Overloaded
       │          │ no decode worker at all for `no_worker_timeout_s`: NoWorkers
       └ no place in the queue, or its first token is not to be expected in time: Overloaded, at once

A pump runs after anything that can make room: a heartbeat, a worker joining, finished work. Only the first waiter is
tried, so that big requests are not overtaken for ever.

The queue is bounded, and of a tenant with a name no more may wait than places are left over (dynamic thresholds,
Choudhury and Hahne 1998). One alone can fill half of it, two a third each, and so on: nobody needs a quota, and whoever
comes finds a place, as long as there are not many more tenants than places. Batch work leaves a quarter to others.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from mesh.domain.errors import InvalidRequest, NoWorkers, Overloaded, WorkerBusy
from router.claim import Claim
from router.forecast import Forecast, retry_after_s
from router.ledger import Booking, Ledger
from router.placement import NoPlacement, Placement, PlacementQuery, Snapshot, place
from router.turns import Lane, Turns


@dataclass(eq=False, slots=True)
class _Waiter:
    query: PlacementQuery
    claim: Claim
    booking: asyncio.Future[Booking]
    is_replay: bool = False
    timer: asyncio.TimerHandle | None = None


class _Outage:
    """Since when there has been no decode worker at all. `patience_s` later it is `accepted`."""

    def __init__(self, patience_s: float, on_accepted: Callable[[], None]) -> None:
        self.patience_s = patience_s
        self.accepted = False
        self._on_accepted = on_accepted
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_on(self) -> bool:
        """There is none now."""
        return self._timer is not None

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


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the queue looks at: the mesh as it is now, and as it is expected to be."""

    snapshot: Callable[[], Snapshot]
    forecast: Forecast


class PlacementQueue:
    """Used by one event loop."""

    def __init__(self, ledger: Ledger, outlook: Outlook, *, max_queued: int, no_worker_timeout_s: float) -> None:
        self._ledger = ledger
        self._snapshot = outlook.snapshot
        self._forecast = outlook.forecast
        self._max_queued = max_queued
        self._waiters: Turns[_Waiter] = Turns()
        self._pump_scheduled = False
        self._waits_for: NoPlacement | None = None
        self._outage = _Outage(no_worker_timeout_s, self._pump)

    @property
    def num_queued(self) -> int:
        """Attempts waiting."""
        return len(self._waiters)

    @property
    def num_queued_choices(self) -> int:
        """Choices waiting: those of one prompt wait together."""
        return sum(waiter.query.num_seqs for waiter in self._waiters.all())

    @property
    def waits_for(self) -> NoPlacement | None:
        """Why the first in line is still there; None if nobody waits."""
        return self._waits_for if self._waiters else None

    async def place(self, query: PlacementQuery, claim: Claim, *, is_replay: bool = False) -> Booking:
        """Wait for room. The caller owns the booking.

        Raises Overloaded if there is no place in the queue, or if waiting makes no sense (never for a replay, which
        goes to the front), NoWorkers, InvalidRequest if the request can never fit. When cancelled, nothing stays
        behind.
        """
        waiter = _Waiter(query, claim, asyncio.get_running_loop().create_future(), is_replay)
        if is_replay:
            self._waiters.add_first(waiter)
            self._pump()
        else:
            self._join(waiter)
        try:
            return await waiter.booking
        except asyncio.CancelledError:
            self._forget(waiter)
            raise
        finally:
            if waiter.timer is not None:
                waiter.timer.cancel()

    def wake(self) -> None:
        """Something has changed: try again soon. Many calls in a row cost one try."""
        if self._waiters and not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def close(self) -> None:
        """Stop the timer."""
        self._outage.end()

    def _join(self, waiter: _Waiter) -> None:
        """Placed at once, or in the line. Raises Overloaded if neither is any use."""
        loop, claim = asyncio.get_running_loop(), waiter.claim
        expected_s = self._expected_s(waiter)
        is_first = next(iter(self._waiters.ahead_of(claim.lane)), None) is None
        self._require_place(claim.lane, expected_s)
        self._waiters.add(claim.lane, waiter)
        self._pump()
        if waiter.booking.done():
            return
        # Whoever is first in line is not judged: how else would a forecast that is too dark be corrected?
        late_s = 0.0 if expected_s is None else loop.time() + expected_s - claim.worthless_after_s
        if expected_s is not None and late_s > 0 and not is_first:
            self._leave(waiter)
            raise Overloaded(
                f"the first token is to be expected in {expected_s:.1f} s, which is too late; try again later",
                retry_after_s=retry_after_s(late_s),
            )
        if claim.first_token_by_s is not None:
            lead_s = self._forecast.first_token.expected_s(waiter.query.num_tokens)
            waiter.timer = loop.call_at(claim.first_token_by_s - lead_s, self._expire, waiter)

    def _expected_s(self, waiter: _Waiter) -> float | None:
        """Seconds until its first token if it joined the line now; None if nobody knows."""
        num_ahead = sum(other.query.num_tokens for other in self._waiters.ahead_of(waiter.claim.lane))
        return self._forecast.first_token_s(num_ahead, waiter.query.num_tokens)

    def _require_place(self, lane: Lane, expected_s: float | None) -> None:
        num_free = lane.priority.share_of(self._max_queued) - len(self._waiters)
        num_own = self._waiters.num_of(lane.tenant)
        if num_free <= 0:
            complaint = f"{len(self._waiters)} requests are waiting already"
        elif lane.tenant and num_own >= num_free:
            complaint = f"{num_own} of your requests are waiting already"
        else:
            return
        raise Overloaded(f"{complaint}; try again later", retry_after_s=retry_after_s(expected_s))

    def _expire(self, waiter: _Waiter) -> None:
        """Too late for its first token: whatever it got now would be for nothing."""
        if self._leave(waiter) and not waiter.booking.done():
            message = "the first token cannot come within ttft_target any more; try again later"
            error = Overloaded(message, retry_after_s=retry_after_s(self._expected_s(waiter)))
            waiter.booking.set_exception(error)

    def _forget(self, waiter: _Waiter) -> None:
        """The caller has left: leave the queue, or give back what came too late."""
        booking = waiter.booking
        if not self._leave(waiter) and booking.done() and not booking.cancelled() and booking.exception() is None:
            booking.result().release()

    def _leave(self, waiter: _Waiter) -> bool:
        """Take it out of the line; False if it is not there."""
        was_waiting = self._waiters.remove(waiter)
        if was_waiting:
            self._note_backlog()
            self.wake()
        return was_waiting

    def _pump(self) -> None:
        """Place waiters from the front for as long as there is room."""
        self._pump_scheduled = False
        while self._waiters and self._place_first():
            pass
        self._note_backlog()

    def _place_first(self) -> bool:
        """Answer the first waiter; False if it has to go on waiting."""
        waiter = self._waiters.first()
        placed = place(waiter.query, self._snapshot())
        self._watch_outage(placed)
        if not isinstance(placed, Placement) and self._is_worth_waiting(placed):
            self._waits_for = placed
            return False
        self._waiters.take_first()
        if not waiter.booking.done():
            self._answer(waiter, placed)
        return True

    def _note_backlog(self) -> None:
        """The forecast learns the pace of the queue while somebody waits for room, not while there is no worker."""
        if self._waiters and not self._outage.is_on:
            self._forecast.queue.begin()
        else:
            self._forecast.queue.end()

    def _watch_outage(self, placed: Placement | NoPlacement) -> None:
        if placed is NoPlacement.NO_DECODE_WORKER:
            self._outage.begin()
        else:
            self._outage.end()

    def _is_worth_waiting(self, why_not: NoPlacement) -> bool:
        if why_not is NoPlacement.NO_DECODE_WORKER:
            return not self._outage.accepted
        return why_not in (NoPlacement.NO_DECODE_ROOM, NoPlacement.NO_PREFILL_ROOM)

    def _answer(self, waiter: _Waiter, placed: Placement | NoPlacement) -> None:
        if isinstance(placed, Placement):
            num_tokens = waiter.query.num_tokens
            waiter.booking.set_result(self._ledger.book(placed, num_tokens, self._forecast.placed(num_tokens)))
        elif placed is NoPlacement.TOO_LARGE:
            total = waiter.query.max_total_tokens
            waiter.booking.set_exception(InvalidRequest(f"no worker can hold a sequence of {total} tokens"))
        elif placed is NoPlacement.AWAY:
            message = f"workers that can hold {waiter.query.max_total_tokens} tokens are away; try again later"
            waiter.booking.set_exception(WorkerBusy(message) if waiter.is_replay else NoWorkers(message))
        else:
            waiter.booking.set_exception(
                NoWorkers(f"no decode worker has been there for {self._outage.patience_s:g} s; try again later")
            )
