"""Cancellation of the current asyncio task, where a library hides or imitates it."""

import asyncio


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
