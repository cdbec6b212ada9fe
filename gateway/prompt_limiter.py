"""Limits how many prompts of one request are at the router at a time (additive increase, multiplicative decrease).

    all prompts ──Overloaded──▶ half of the running ones ──each retry-after without a refusal──▶ one more
A refused prompt waits until another prompt of the request ends, or the router's retry-after has passed. Halving the
limit leaves capacity to other clients. If the limit is one, the request also pauses between two prompts, so that others
can get the slot. If the router admits none of the prompts, the request is refused like any other.
"""

import asyncio
from heapq import heappop, heappush

import tandem

_RETRY_AFTER_S = 1.0
_MAX_PAUSE_S = 1.0
# The pause after a prompt that held the only slot, as a share of its duration: retries of other clients find it free.
_PAUSE_SHARE = 0.25


class PromptLimiter:
    """One per request. Refused prompts are retried until `patience_s` have passed."""

    def __init__(self, num_prompts: int, patience_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = self._loop.time() + patience_s
        self._limit = num_prompts
        self._num_running = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._has_admitted = False
        self._resume_at_s = 0.0
        self._grows_at_s = float("inf")
        self._retry_after_s = _RETRY_AFTER_S

    async def acquire(self, number: int) -> float:
        """Wait for a slot; lower numbers go first. Returns the loop time at which the slot was granted."""
        slot = self._loop.create_future()
        heappush(self._waiting, (number, slot))
        self._grant_slots()
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self._free_slot()
            raise
        return self._loop.time()

    def on_admitted(self) -> None:
        """Record that the router has admitted a prompt of this request."""
        self._has_admitted = True

    def release(self, since_s: float) -> None:
        """Release the slot of a prompt that has ended. `since_s` is when the slot was granted."""
        now_s = self._loop.time()
        self._resume_at_s = 0.0
        if self._limit == 1 and self._grows_at_s < float("inf"):
            self._resume_at_s = now_s + min(_MAX_PAUSE_S, _PAUSE_SHARE * (now_s - since_s))
        if now_s >= self._grows_at_s:
            self._limit += 1
            self._grows_at_s = now_s + self._retry_after_s
        self._free_slot()

    def on_overloaded(self, error: tandem.Overloaded) -> bool:
        """Release the slot of a prompt that the router refused. True if it must `acquire` again, False to give up."""
        num_others = self._num_running - 1
        self._retry_after_s = error.retry_after_s or _RETRY_AFTER_S
        self._resume_at_s = self._grows_at_s = self._loop.time() + self._retry_after_s
        none_admitted = not num_others and not self._has_admitted
        self._limit = max(1, min(self._limit, num_others // 2))
        self._free_slot()
        return not none_admitted and self._resume_at_s < self._deadline_s

    def _free_slot(self) -> None:
        self._num_running -= 1
        self._grant_slots()

    def _grant_slots(self) -> None:
        """Grant free slots to waiting prompts, now or as soon as the router accepts retries."""
        while self._waiting and self._num_running < self._limit:
            slot = self._waiting[0][1]
            if not slot.done() and self._loop.time() < self._resume_at_s:
                self._loop.call_at(self._resume_at_s, self._grant_slots)
                return
            heappop(self._waiting)
            if not slot.done():  # else its prompt was cancelled
                slot.set_result(None)
                self._num_running += 1
