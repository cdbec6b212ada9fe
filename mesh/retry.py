"""Loops that try again until they are cancelled: the delays between attempts, and cancellation that a library hides."""

import asyncio
import random


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
