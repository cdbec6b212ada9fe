"""Retries and their delays. Only calls that have delivered nothing are retried.

If a router cannot be reached, is stopping or has no workers, the client tries the next router at once. It does not do
so for an overloaded router: routers of one mesh share a limit, so the next router would refuse as well, and all refused
clients would arrive there together. The client waits for as long as the router asks, and then tries again.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tandem.exceptions import Cancelled, ConnectionFailed, NoWorkers, Overloaded, TandemError

T = TypeVar("T")

ELSEWHERE = (ConnectionFailed, NoWorkers, Cancelled)
"""Errors that may not occur at another router."""

RETRYABLE = (*ELSEWHERE, Overloaded)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time, in seconds of the monotonic clock. One deadline covers all attempts of a call."""

    at_s: float

    @classmethod
    def after(cls, timeout_s: float) -> "Deadline":
        """The deadline `timeout_s` from now."""
        return cls(time.monotonic() + timeout_s)

    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self.at_s - time.monotonic())


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with jitter, and never shorter than the server asks for."""

    max_retries: int = 2
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 5.0

    def delay_s(self, error: TandemError, num_retries: int, remaining_s: float) -> float | None:
        """Seconds to wait before the next attempt; None to raise `error` instead."""
        if num_retries >= self.max_retries or not isinstance(error, RETRYABLE):
            return None
        backoff_s = min(self.max_backoff_s, self.initial_backoff_s * 2**num_retries)
        jitter = random.uniform(0.5, 1.0)
        requested_s = error.retry_after_s if isinstance(error, Overloaded) else None
        # Clients that were refused together must not return together: the jitter is added to the requested delay.
        delay_s = backoff_s * jitter if requested_s is None else requested_s + backoff_s * jitter
        return delay_s if delay_s < remaining_s else None


async def retrying(attempt: Callable[[], Awaitable[T]], policy: RetryPolicy, deadline: Deadline) -> T:
    """Call `attempt()` until it returns, or until the policy gives up and its error is raised."""
    num_retries = 0
    while True:
        try:
            return await attempt()
        except TandemError as error:
            delay_s = policy.delay_s(error, num_retries, deadline.remaining_s())
            if delay_s is None:
                raise
        await asyncio.sleep(delay_s)
        num_retries += 1
