"""Two asyncio helpers: waiting for a thread even when cancelled, and task groups that raise plain errors."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


async def run_to_end(executor: Executor, work: Callable[[], T]) -> T:
    """Run `work` on a thread. If cancelled, raise only after the thread has left `work`, or if it never starts."""
    future = executor.submit(work)
    waiting = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        future.cancel()
        while not waiting.done():
            try:
                await asyncio.wait([waiting])
            except asyncio.CancelledError:
                continue  # the thread may still access its memory, which the caller frees afterwards
        if not waiting.cancelled():
            waiting.exception()  # marks the exception as retrieved
        raise


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises its first error instead of an ExceptionGroup."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
