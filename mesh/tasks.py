"""asyncio:

delays between attempts          backoff_s, Backoff
cancellation that libraries hide is_cancelled, require_not_cancelled
start tasks                      spawn (nobody awaits it); together, task_group (they succeed or fail as one)
wait, even when cancelled        run_to_end (a thread), until_ended (a coroutine); set_within (an event, for a time)
end tasks                        cancel, cancel_all, mark_retrieved
from another thread              call_on
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")


def backoff_s(num_failures: int, *, first_s: float, max_s: float) -> float:
    """Return the seconds to wait after this many failures in a row; 0 without failures."""
    return min(max_s, first_s * 2 ** min(num_failures - 1, 32)) if num_failures else 0.0


class Backoff:
    """Delays that double from `first_s` to `max_s`. Each is shortened by a random share of up to `jitter`."""

    def __init__(self, first_s: float, max_s: float, *, jitter: float = 0.0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._jitter = jitter
        self._delay_s = first_s

    def next_s(self, lasted_s: float = 0.0) -> float:
        """Return the delay before the next attempt. Delays start again at `first_s` if the attempt that just failed had
        `lasted_s` longer than `max_s`; a shorter success does not count, because it may repeat at once.
        """
        if lasted_s > self._max_s:
            self._delay_s = self._first_s
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, self._max_s)
        return delay_s * random.uniform(1 - self._jitter, 1.0)


def is_cancelled() -> bool:
    """Return True if the current task has been cancelled. grpc.aio also raises CancelledError when the peer ends a
    call; then this is False, and the task should go on.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def require_not_cancelled() -> None:
    """Raise CancelledError if the current task was cancelled without noticing: before Python 3.12, asyncio.wait_for,
    which redis uses for writes, can swallow a cancellation. Call this in every loop around redis.
    """
    if asyncio.current_task() is not None and is_cancelled():
        raise asyncio.CancelledError


def spawn(running: "set[asyncio.Task[T]]", coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Run a coroutine as a task, which is in `running` until it has ended: asyncio would let it be collected before."""
    task = asyncio.get_running_loop().create_task(coroutine)
    running.add(task)
    task.add_done_callback(running.discard)
    return task


async def together(coroutines: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run the coroutines concurrently. The first error cancels the others and is raised unchanged."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def run_to_end(executor: Executor, call: Callable[[], T]) -> T:
    """Run `call` on a thread. If cancelled, raise only after the thread has left `call`, or if it never starts."""
    future = executor.submit(call)
    try:
        return await asyncio.wrap_future(future)  # if cancelled, it cancels `future` unless the thread has begun
    except asyncio.CancelledError:
        while not future.done():
            waiting = asyncio.wrap_future(future)
            waiting.add_done_callback(mark_retrieved)
            with suppress(asyncio.CancelledError):  # the thread may still access its memory, which the caller frees
                await asyncio.wait([waiting])
        raise


async def until_ended(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that takes a bounded time. If cancelled, raise only after it has ended."""
    task = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        mark_retrieved(task)
        raise


async def cancel_all(tasks: "Iterable[asyncio.Task[Any]]") -> None:
    """Cancel tasks, and return once all have ended. Their errors are dropped; `cancel` raises that of one task."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def cancel(task: "asyncio.Task[Any]") -> None:
    """Cancel a task, and return once it has ended. Raises the error with which it ends, but CancelledError only if the
    caller is cancelled: to await the task itself would raise it in both cases.
    """
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def set_within(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait until the event is set, then return True; return False once `timeout_s` have passed."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def call_on(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Call `callback` on `loop`, from any thread. Does nothing once the loop is closed: the process is stopping."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)


def mark_retrieved(future: "asyncio.Future[Any]") -> None:
    """Keep asyncio from logging the error of a future that is done, because others raise it or nobody waits for it."""
    if not future.cancelled():
        future.exception()


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises its first error instead of an ExceptionGroup."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
