"""Two asyncio helpers: waiting for a thread even when cancelled, and task groups that raise plain errors."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

T = TypeVar("T")


async def run_to_end(executor: Executor, work: Callable[[], T]) -> T:
    """Run `work` on a thread. If cancelled, raise only after the thread has left `work`, or if it never starts."""
    future = executor.submit(work)
    try:
        return await asyncio.wrap_future(future)  # if cancelled, it cancels `future` unless the thread has begun
    except asyncio.CancelledError:
        while not future.done():
            waiting = asyncio.wrap_future(future)
            waiting.add_done_callback(_retrieve)
            with suppress(asyncio.CancelledError):  # the thread may still access its memory, which the caller frees
                await asyncio.wait([waiting])
        raise


def _retrieve(future: "asyncio.Future[T]") -> None:
    if not future.cancelled():
        future.exception()  # marks the exception as retrieved


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises its first error instead of an ExceptionGroup."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
