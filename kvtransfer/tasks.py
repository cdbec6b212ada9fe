"""Helpers for asyncio: waiting for a thread even when cancelled, task groups that raise plain errors, errors that need
no log.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_end(executor: Executor, work: Callable[[], T]) -> T:
    """Run `work` on a thread. If cancelled, raise only after the thread has left `work`, or if it never starts."""
    future = executor.submit(work)
    try:
        return await asyncio.wrap_future(future)  # if cancelled, it cancels `future` unless the thread has begun
    except asyncio.CancelledError:
        while not future.done():
            waiting = asyncio.wrap_future(future)
            waiting.add_done_callback(mark_retrieved)
            with suppress(asyncio.CancelledError):  # the thread may still access its memory, which the caller frees
                await asyncio.wait([waiting])
        raise


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
