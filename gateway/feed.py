"""Events of running calls, read by tasks of their own, so that who waits for them may do other things meanwhile."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tandem import TokenEvent

# What a client has not taken yet; then the router is no longer read, which sees a slow reader.
_MAX_WAITING = 256


@contextmanager
def _alarm(changed: asyncio.Event, after_s: float | None) -> Iterator[Callable[[], None]]:
    """Sets `changed` whenever `after_s` have gone by since the last restart; yields what restarts it. One timer that
    looks at the clock, not one for each token.
    """
    loop = asyncio.get_running_loop()
    since_s = loop.time()
    timer: asyncio.TimerHandle | None = None

    def restart() -> None:
        nonlocal since_s
        since_s = loop.time()

    def look(limit_s: float) -> None:
        nonlocal timer
        left_s = since_s + limit_s - loop.time()
        if left_s <= 0:
            changed.set()
            left_s = limit_s
        timer = loop.call_later(left_s, look, limit_s)

    if after_s is not None:
        timer = loop.call_later(after_s, look, after_s)
    try:
        yield restart
    finally:
        if timer is not None:
            timer.cancel()


class Feed:
    """The events of several calls, merged as they come; choices are numbered through, `num_choices` for each call.

    Close it in any case: that cancels the calls. The first error ends all of them.
    """

    def __init__(
        self,
        calls: Sequence[AsyncGenerator[TokenEvent, None]],
        num_choices: int = 1,
        observe: Callable[[TokenEvent], None] = lambda _: None,
    ) -> None:
        self._observe = observe
        self._events: deque[TokenEvent] = deque()
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._error: BaseException | None = None
        self._open = len(calls)
        self._tasks = [asyncio.create_task(self._read(call, number * num_choices)) for number, call in enumerate(calls)]

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True once there are events, an error, or the end; False after `timeout_s`."""
        if self._has_news:
            return True
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    @property
    def _has_news(self) -> bool:
        return bool(self._events) or self._error is not None or not self._open

    def raise_early_error(self) -> None:
        """Raise the error if there is one and nothing came before it."""
        if self._error is not None and not self._events:
            raise self._error

    async def batches(self, silence_s: float | None = None) -> AsyncIterator[list[TokenEvent]]:
        """Events that are ready together; an empty list after each `silence_s` without any. Raises TandemError."""
        with _alarm(self._changed, silence_s) as restart_alarm:
            while True:
                has_news = self._has_news
                if not has_news:
                    self._changed.clear()
                    await self._changed.wait()
                    has_news = self._has_news
                restart_alarm()
                events = list(self._events)
                self._events.clear()
                self._has_room.set()
                if events or not has_news:
                    yield events
                elif self._error is not None:
                    raise self._error
                else:
                    return

    async def close(self) -> None:
        """Cancel the calls; returns when they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, call: AsyncGenerator[TokenEvent, None], offset: int) -> None:
        try:
            async for event in call:
                numbered = replace(event, index=event.index + offset) if offset else event
                self._observe(numbered)
                self._events.append(numbered)
                self._changed.set()
                if len(self._events) >= _MAX_WAITING:
                    self._has_room.clear()
                    await self._has_room.wait()
        except Exception as error:
            self._fail(error)
        finally:
            self._open -= 1
            self._changed.set()
            await call.aclose()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        own = asyncio.current_task()
        for task in self._tasks:
            if task is not own:
                task.cancel()
