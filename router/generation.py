"""One client's stream: its choices run side by side, and what they bring is read here, merged; or, where only the best
are wanted, ranked, once all have ended.

Choices push nothing: they say that something is ready (`_notify`), and the reader takes all of it at once, so tokens
that are ready together share a message. The stream ends after the last choice has, or with the first error. A client
that takes nothing for too long, or lets too much pile up, is cut off: its work is aborted and its memory freed at once,
and it gets an error as soon as it reads again.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace

from mesh.domain.errors import DeadlineExceeded
from router.admission import Permit
from router.choice import Choice, Chunk

# Of a stream's choices together, alternatives counted too; one takes about 200 bytes, so they are less than 1 MiB.
_MAX_PENDING_EVENTS = 4096

RunChoice = Callable[[Choice], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Work:
    """A choice with its permit, and what runs it."""

    choice: Choice
    permit: Permit
    run: RunChoice


class GenerationStream:
    """Read `chunks()` to the end, or `close()`. Permits are given back when their choices have ended; the reader is
    watched until it has everything. With `num_best`, so many choices are given out, each whole, numbered from the best.
    """

    def __init__(self, works: list[Work], *, slow_reader_s: float, num_best: int | None = None) -> None:
        self._choices = [work.choice for work in works]
        self._num_best = num_best
        self._slow_reader_s = slow_reader_s
        self._loop = asyncio.get_running_loop()
        self._ready: dict[Choice, None] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._reading_since_s: float | None = None
        self._num_open = len(works)
        self._tasks = [self._start(work) for work in works]
        self._watchdog = self._loop.call_later(slow_reader_s, self._watch_reader)
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when no choice runs any more."""

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """Everything, as it comes. Raises the error the stream ends with."""
        try:
            while self._num_open or self._ready or self._error is not None:
                await self._wait_ready()
                for chunk in self._take_ready():
                    self._reading_since_s = self._loop.time()
                    yield chunk
                    self._reading_since_s = None
                if self._error is not None:
                    raise self._error
        finally:
            self.close()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, if it has not ended."""
        if self._error is None:
            self._error = error
        self.close()
        self._wake()

    def close(self) -> None:
        """Cancel what still runs. Does nothing the second time."""
        self._watchdog.cancel()
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Work) -> "asyncio.Task[None]":
        work.choice.on_change = lambda: self._notify(work.choice)
        task = self._loop.create_task(_run(work))
        task.add_done_callback(lambda done: self._choice_ended(work, done))
        return task

    def _notify(self, choice: Choice) -> None:
        if self._num_best is not None:
            return  # until all have ended
        self._ready[choice] = None
        if sum(each.num_pending for each in self._ready) > _MAX_PENDING_EVENTS:
            self._cut_off("the client reads too slowly")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait_ready(self) -> None:
        if not self._ready and self._error is None:
            self._waiter = self._loop.create_future()
            await self._waiter

    def _take_ready(self) -> list[Chunk]:
        choices, self._ready = self._ready, {}
        chunks = [chunk for choice in choices if (chunk := choice.take()) is not None]
        return chunks if self._num_best is None else [replace(chunk, index=i) for i, chunk in enumerate(chunks)]

    def _choice_ended(self, work: Work, task: "asyncio.Task[None]") -> None:
        work.permit.release()
        work.choice.on_change = _nothing  # breaks the cycle between choice and stream
        self._num_open -= 1
        error = None if task.cancelled() else task.exception()
        if error is not None and self._error is None:
            self._error = error
            self.close()
        if self._num_open == 0:
            if self._num_best is not None and self._error is None:
                self._rank(self._num_best)
            self.ended.set_result(None)
        self._wake()

    def _rank(self, num_best: int) -> None:
        """Equal ones stay in order. A choice that was cancelled has no end: then nobody reads any more."""
        ended = [choice for choice in self._choices if choice.finish_reason is not None]
        ended.sort(key=lambda choice: -choice.mean_logprob)
        self._ready = dict.fromkeys(ended[:num_best])

    def _watch_reader(self) -> None:
        """One timer for the stream, not one for each message."""
        since_s = self._reading_since_s
        waited_s = 0.0 if since_s is None else self._loop.time() - since_s
        if waited_s >= self._slow_reader_s:
            self._cut_off(f"the client took nothing for {waited_s:.0f} s")
        else:
            self._watchdog = self._loop.call_later(max(0.1, self._slow_reader_s - waited_s), self._watch_reader)

    def _cut_off(self, message: str) -> None:
        self._ready.clear()
        self.fail(DeadlineExceeded(message))


def _nothing() -> None:
    """Nobody listens any more."""


async def _run(work: Work) -> None:
    await work.run(work.choice)
