"""Token events of several router calls, merged into one feed.

Each call is read by its own task, so a consumer can wait for events with a timeout without cancelling a call.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from heapq import heappop, heappush

from mesh.tasks import cancel_all, set_within
from tandem import Overloaded, TokenEvent

Call = Callable[[], AsyncGenerator[TokenEvent, None]]
"""Creates a call of the router. The call starts when its events are read."""

# Events that the client has not taken yet. At the limit the router is no longer read. The router goes on reading its
# workers, up to limits of its own (router/answer_stream.py), and then cuts the stream off.
_MAX_BUFFERED_EVENTS = 32

_RETRY_AFTER_S = 1.0
_MAX_PAUSE_S = 1.0
# The pause after a prompt that held the only slot, as a share of its duration: retries of other clients find it free.
_PAUSE_SHARE = 0.25


class Feed:
    """The events of several calls in the order of their arrival. Call i has choices i * `num_choices` and up.

    A call that the router refuses with Overloaded is retried for at most `patience_s` seconds (PromptLimiter). The
    first other error cancels all calls. The owner must call `close`, which cancels the calls that still run.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        num_choices: int = 1,
        observe: Callable[[TokenEvent], None] = lambda _: None,
        patience_s: float = 0.0,
    ) -> None:
        self._limiter = PromptLimiter(len(calls), patience_s)
        self._observe = observe
        self._events: deque[TokenEvent] = deque()
        self._changed = asyncio.Event()
        self._has_capacity = asyncio.Event()
        self._has_capacity.set()
        self._error: BaseException | None = None
        self._num_open_calls = len(calls)
        self._tasks = [
            asyncio.create_task(self._read(call, number, number * num_choices)) for number, call in enumerate(calls)
        ]

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for events, an error, or the end: True. Returns False after `timeout_s`."""
        if self._is_ready:
            return True
        self._changed.clear()
        return await set_within(self._changed, timeout_s)

    @property
    def _is_ready(self) -> bool:
        return bool(self._events) or self._error is not None or not self._num_open_calls

    def raise_early_error(self) -> None:
        """Raise the error, if there is one and no event came before it."""
        if self._error is not None and not self._events:
            raise self._error

    async def batches(self, silence_s: float | None = None) -> AsyncIterator[list[TokenEvent]]:
        """Yield the events that are ready, or an empty list after every `silence_s` without any. Raises TandemError."""
        with _silence_timer(self._changed, silence_s) as restart_timer:
            while True:
                is_ready = self._is_ready
                if not is_ready:
                    self._changed.clear()
                    await self._changed.wait()
                    is_ready = self._is_ready
                restart_timer()
                events = list(self._events)
                self._events.clear()
                self._has_capacity.set()
                if events or not is_ready:
                    yield events
                elif self._error is not None:
                    raise self._error
                else:
                    return

    async def close(self) -> None:
        """Cancel the calls, and return when all have ended."""
        await cancel_all(self._tasks)

    async def _read(self, call: Call, number: int, offset: int) -> None:
        try:
            while not await self._try_call(call, number, offset):
                pass
        except Exception as error:
            self._fail(error)
        finally:
            self._num_open_calls -= 1
            self._changed.set()

    async def _try_call(self, call: Call, number: int, offset: int) -> bool:
        """Read a call to its end. False if the router refused it and it must be retried."""
        since_s = await self._limiter.acquire(number)
        num_events = 0
        try:
            async with aclosing(call()) as events:
                async for event in events:
                    num_events += 1
                    self._limiter.on_admitted()
                    await self._put(replace(event, index=event.index + offset) if offset else event)
        except Overloaded as error:
            if num_events or not self._limiter.on_overloaded(error):
                raise
            return False
        self._limiter.release(since_s)
        return True

    async def _put(self, event: TokenEvent) -> None:
        self._observe(event)
        self._events.append(event)
        self._changed.set()
        if len(self._events) >= _MAX_BUFFERED_EVENTS:
            self._has_capacity.clear()
            await self._has_capacity.wait()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()


@contextmanager
def _silence_timer(changed: asyncio.Event, after_s: float | None) -> Iterator[Callable[[], None]]:
    """Set `changed` whenever `after_s` have passed since the last restart. Yields a function that restarts the timer.

    A single timer checks the clock when it fires; rescheduling a timer for every token would cost more.
    """
    loop = asyncio.get_running_loop()
    since_s = loop.time()
    timer: asyncio.TimerHandle | None = None

    def restart() -> None:
        nonlocal since_s
        since_s = loop.time()

    def check(limit_s: float) -> None:
        nonlocal timer
        left_s = since_s + limit_s - loop.time()
        if left_s <= 0:
            changed.set()
            left_s = limit_s
        timer = loop.call_later(left_s, check, limit_s)

    if after_s is not None:
        timer = loop.call_later(after_s, check, after_s)
    try:
        yield restart
    finally:
        if timer is not None:
            timer.cancel()


class PromptLimiter:
    """Limits how many prompts of one request are at the router at a time (additive increase, multiplicative decrease).

        all prompts ──Overloaded──▶ half of the running ones ──each retry-after without a refusal──▶ one more
    A refused prompt waits until another prompt of the request ends, or the router's retry-after has passed. Halving the
    limit leaves capacity to other clients. If the limit is one, the request also pauses between two prompts, so that
    others can get the slot. If the router admits none of the prompts, the request is refused like any other. Refused
    prompts are retried until `patience_s` have passed.
    """

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

    def on_overloaded(self, error: Overloaded) -> bool:
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
