"""Two helpers around asyncio: threads that are never left behind, and task groups with plain errors."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


async def run_to_end(executor: Executor, work: Callable[[], T]) -> T:
    """Run `work` on a thread. If cancelled, raise only once the thread has left `work`, or never entered it."""
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
                continue  # already on the way out; the thread's memory must not be freed under it
        if not waiting.cancelled():
            waiting.exception()  # marks it as seen
        raise


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises its first error itself rather than a group of one."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
