"""The queue for workers: attempts wait here, in order, until a prefill and a decode worker have capacity.

    place() ─▶ waiters (ordered by fair_queue.py) ──pump: is there capacity for the head?──▶ CapacityClaim
       │          │ cancelled or past its deadline: removed at once
       │          │ its first token can no longer come in time: Overloaded
       │          │ no decode worker at all for `no_worker_timeout_s`: NoWorkers
       │          │ those that could hold it or have its adapter are away: NoWorkers, at once; a replay is set aside
       │          │     for as long, while others pass it
       └ queue full, or the first token is not expected in time: Overloaded, at once

A pump runs after any event that can free capacity: a heartbeat, a worker joining, finished work. Only the head is
tried, so that small requests do not overtake a big one forever. Prefill workers have separate budgets for short and
long prompts (admission/placement.py): if the head lacks only its prefill budget, the first waiter of the other kind is
tried too.

The queue is bounded. A named tenant may have at most as many waiting requests as there are free slots (dynamic
thresholds, Choudhury and Hahne 1998): one tenant alone can fill half of the queue, two a third each, and so on. No
tenant needs a quota, and a newcomer finds a slot as long as tenants do not greatly outnumber slots. Batch requests
leave a quarter of the queue to others.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from mesh.domain.errors import InvalidRequest, MeshError, NoWorkers, Overloaded
from mesh.domain.worker import WorkerRole
from router.admission.fair_queue import FairQueue, QueueEntry
from router.admission.forecast import Forecast, retry_after_s
from router.admission.in_flight import CapacityClaim, InFlightTable
from router.admission.placement import MeshSnapshot, NoPlacement, Placement, PlacementQuery, is_short_in, place

_AWAY = (NoPlacement.AWAY, NoPlacement.NO_ADAPTER)


@dataclass(eq=False, slots=True)
class _Waiter:
    query: PlacementQuery
    entry: QueueEntry
    claim: asyncio.Future[CapacityClaim]
    is_replay: bool
    timer: asyncio.TimerHandle | None = None


class _Outage:
    """A time without any decode worker. After `patience_s` it is `accepted`: requests fail instead of waiting."""

    def __init__(self, patience_s: float, on_accepted: Callable[[], None]) -> None:
        self.patience_s = patience_s
        self.accepted = False
        self._on_accepted = on_accepted
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_on(self) -> bool:
        return self._timer is not None

    def begin(self) -> None:
        """There is no decode worker now. Idempotent."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.patience_s, self._accept)

    def end(self) -> None:
        """There is a decode worker again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.accepted = None, False

    def _accept(self) -> None:
        self.accepted = True
        self._on_accepted()


class PlacementQueue:
    """The attempts that wait for workers, in their order. Used by one event loop. `snapshot` returns the mesh as it is
    now."""

    def __init__(
        self,
        in_flight: InFlightTable,
        snapshot: Callable[[], MeshSnapshot],
        forecast: Forecast,
        *,
        max_queued: int,
        no_worker_timeout_s: float,
    ) -> None:
        self._in_flight = in_flight
        self._snapshot = snapshot
        self._forecast = forecast
        self._max_queued = max_queued
        self._waiters: FairQueue[_Waiter] = FairQueue()
        self._aside: dict[_Waiter, None] = {}  # replays whose decode workers are away
        self._pump_scheduled = False
        self._shortage: NoPlacement | None = None
        self._outage = _Outage(no_worker_timeout_s, self._pump)

    @property
    def num_queued(self) -> int:
        return len(self._waiters) + len(self._aside)

    @property
    def num_queued_choices(self) -> int:
        """Number of waiting choices; choices of one prompt wait as one attempt."""
        return sum(waiter.query.num_seqs for waiter in (*self._waiters.all(), *self._aside))

    def num_tokens_waiting(self, role: WorkerRole) -> int:
        """Prompt tokens of the waiting attempts, cached ones included, if the head waits for this role; otherwise 0:
        prompts that wait for the other role are no reason for more workers of this one.
        """
        lacks_prefill = self.shortage is NoPlacement.NO_PREFILL_CAPACITY
        if lacks_prefill is not (role is WorkerRole.PREFILL):
            return 0
        return sum(waiter.query.num_tokens for waiter in self._waiters.all())

    @property
    def shortage(self) -> NoPlacement | None:
        """The reason for which the head still waits; None if the queue is empty."""
        return self._shortage if self._waiters else None

    async def place(self, query: PlacementQuery, entry: QueueEntry, *, is_replay: bool = False) -> CapacityClaim:
        """Wait for capacity. The caller owns the claim.

        Raises Overloaded if the queue is full or the first token would come too late. A replay waits behind earlier
        replays only and is never refused like this. Raises NoWorkers, and InvalidRequest if no worker can ever hold the
        request. Cancellation leaves nothing behind.
        """
        waiter = _Waiter(query, entry, asyncio.get_running_loop().create_future(), is_replay)
        if is_replay:
            self._waiters.add_replay(waiter)
            self._pump()
        else:
            self._join(waiter)
        try:
            return await waiter.claim
        except asyncio.CancelledError:
            self._forget(waiter)
            raise
        finally:
            if waiter.timer is not None:
                waiter.timer.cancel()

    def wake(self) -> None:
        """Capacity may have become free: pump soon. Many calls in a row cost one pump."""
        if (self._waiters or self._aside or self._outage.is_on) and not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def close(self) -> None:
        """Stop the timer of an outage without workers."""
        self._outage.end()

    def _join(self, waiter: _Waiter) -> None:
        """Place at once or enqueue. Raises Overloaded if the queue is full or waiting is useless."""
        loop, entry = asyncio.get_running_loop(), waiter.entry
        num_ahead = self._num_tokens_ahead(waiter)
        expected_s = self._forecast.first_token_s(num_ahead, waiter.query.num_tokens)
        self._require_slot(entry, expected_s)
        self._waiters.add(entry, waiter)
        self._pump()
        if waiter.claim.done():
            return
        # The head is never refused: only placed requests can correct a forecast that is too pessimistic.
        if expected_s is not None and num_ahead:
            late_s = loop.time() + expected_s - entry.worthless_after_s
            if late_s > 0:
                self._leave(waiter)
                raise Overloaded(
                    f"the first token is expected in {expected_s:.1f} s, which is too late; try again later",
                    retry_after_s=retry_after_s(late_s),
                )
        if entry.first_token_by_s is not None:
            lead_s = self._forecast.first_token.expected_s(waiter.query.num_tokens)
            waiter.timer = loop.call_at(entry.first_token_by_s - lead_s, self._expire, waiter)

    def _num_tokens_ahead(self, waiter: _Waiter) -> int:
        """Tokens of the prompts ahead that are of the same kind, short or long: the other kind does not delay it."""
        ahead = [waiter_ahead.query for waiter_ahead in self._waiters.ahead_of(waiter.entry)]
        if not ahead:
            return 0
        is_short = is_short_in(self._snapshot())
        return sum(query.num_tokens for query in ahead if is_short(query) is is_short(waiter.query))

    def _require_slot(self, entry: QueueEntry, expected_s: float | None) -> None:
        num_free = entry.priority.share_of(self._max_queued) - len(self._waiters)
        num_of_tenant = self._waiters.num_of(entry.tenant)
        if num_free <= 0:
            complaint = f"{len(self._waiters)} requests are waiting already"
        elif entry.tenant and num_of_tenant >= num_free:
            complaint = f"{num_of_tenant} of your requests are waiting already"
        else:
            return
        raise Overloaded(f"{complaint}; try again later", retry_after_s=retry_after_s(expected_s))

    def _expire(self, waiter: _Waiter) -> None:
        """Fail a waiter whose first token can no longer come in time."""
        if self._leave(waiter) and not waiter.claim.done():
            message = "the first token cannot come within ttft_target any more; try again later"
            expected_s = self._forecast.first_token_s(self._num_tokens_ahead(waiter), waiter.query.num_tokens)
            waiter.claim.set_exception(Overloaded(message, retry_after_s=retry_after_s(expected_s)))

    def _forget(self, waiter: _Waiter) -> None:
        """Clean up for a cancelled caller: leave the queue, or release a claim that came too late."""
        claim = waiter.claim
        if not self._leave(waiter) and claim.done() and not claim.cancelled() and claim.exception() is None:
            claim.result().release()

    def _leave(self, waiter: _Waiter) -> bool:
        """Remove the waiter; False if it is not in the queue."""
        was_waiting = waiter in self._aside or self._waiters.remove(waiter)
        self._aside.pop(waiter, None)
        if was_waiting:
            self._note_backlog()
            self.wake()
        return was_waiting

    def _pump(self) -> None:
        """Place waiters from the head while there is capacity. An outage ends with the first decode worker, whether
        anything waits for it or not: the next one is another."""
        self._pump_scheduled = False
        if self._outage.is_on and len(self._snapshot().decode):
            self._outage.end()
        for waiter in [waiter for waiter in self._aside if place(waiter.query, self._snapshot()) not in _AWAY]:
            self._bring_back(waiter)
        while self._waiters and self._place_next():
            pass
        self._note_backlog()

    def _put_aside(self, waiter: _Waiter, error: NoWorkers) -> None:
        """Let others pass a replay whose decode workers are away; they have as long to come back as if all were."""
        self._aside[waiter] = None
        waiter.timer = asyncio.get_running_loop().call_later(self._outage.patience_s, self._give_up, waiter, error)

    def _bring_back(self, waiter: _Waiter) -> None:
        del self._aside[waiter]
        assert waiter.timer is not None
        waiter.timer.cancel()
        self._waiters.add_replay(waiter)

    def _give_up(self, waiter: _Waiter, error: NoWorkers) -> None:
        if self._leave(waiter) and not waiter.claim.done():
            waiter.claim.set_exception(error)

    def _place_next(self) -> bool:
        """Place or refuse the head. If only the head's prefill budget is used up, place the first waiter of the other
        kind instead.

        Returns False if all must wait.
        """
        first, snapshot = self._waiters.first(), self._snapshot()
        placed = place(first.query, snapshot)
        if placed is NoPlacement.NO_DECODE_WORKER:
            self._outage.begin()
        else:
            self._outage.end()
        if not isinstance(placed, Placement) and self._should_wait(placed):
            self._shortage = placed
            return placed is NoPlacement.NO_PREFILL_CAPACITY and self._place_other_kind(first, snapshot)
        self._waiters.take_first()
        if isinstance(placed, Placement):
            self._grant(first, placed)
        else:
            self._refuse(first, placed)
        return True

    def _place_other_kind(self, first: _Waiter, snapshot: MeshSnapshot) -> bool:
        """Place the first short prompt past a long head that waits for prefill capacity, or the other way round."""
        is_short = is_short_in(snapshot)
        candidate = self._waiters.first_where(lambda waiter: is_short(waiter.query) is not is_short(first.query))
        placed = None if candidate is None else place(candidate.query, snapshot)
        if candidate is None or not isinstance(placed, Placement):
            return False
        self._waiters.take(candidate)
        self._grant(candidate, placed)
        return True

    def _note_backlog(self) -> None:
        """Let the forecast measure the queue's rate only while waiters lack capacity, not while there is no worker."""
        if self._waiters and not self._outage.is_on:
            self._forecast.queue.begin()
        else:
            self._forecast.queue.end()

    def _should_wait(self, shortage: NoPlacement) -> bool:
        if shortage is NoPlacement.NO_DECODE_WORKER:
            return not self._outage.accepted
        return shortage in (NoPlacement.NO_DECODE_CAPACITY, NoPlacement.NO_PREFILL_CAPACITY)

    def _grant(self, waiter: _Waiter, placement: Placement) -> None:
        if not waiter.claim.done():
            num_tokens = waiter.query.num_tokens
            on_first_token = self._forecast.placed(num_tokens)
            waiter.claim.set_result(self._in_flight.claim(placement, num_tokens, on_first_token))

    def _refuse(self, waiter: _Waiter, shortage: NoPlacement) -> None:
        """Let `place` raise an error. A replay whose decode workers are away is put aside instead."""
        if waiter.claim.done():
            return
        error: MeshError
        if shortage is NoPlacement.TOO_LARGE:
            error = InvalidRequest(f"no worker can hold a sequence of {waiter.query.max_total_tokens} tokens")
        elif shortage in _AWAY:
            needed = f"can hold {waiter.query.max_total_tokens} tokens"
            if shortage is NoPlacement.NO_ADAPTER:
                needed = "have the request's adapter"
            error = NoWorkers(f"decode workers that {needed} are away; try again later")
            if waiter.is_replay:
                self._put_aside(waiter, error)
                return
        else:
            patience_s = self._outage.patience_s
            error = NoWorkers(f"no decode worker has taken requests for {patience_s:g} s; try again later")
        waiter.claim.set_exception(error)
