"""When and how long to wait before trying again. Only calls that have delivered nothing are tried again.

A router that cannot be reached, is stopping or has no workers is passed over for the next one without waiting. One that
is overloaded is not: routers that share a mesh share its cap, so the next would refuse as well, and clients that a cap
turns away from one router must not fall upon the other all at once. They come back after the time the router asks for.
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
"""What another router may be able to cure."""

RETRYABLE = (*ELSEWHERE, Overloaded)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in monotonic time. It covers all attempts of a call."""

    at_s: float

    @classmethod
    def after(cls, timeout_s: float) -> "Deadline":
        """The deadline `timeout_s` from now."""
        return cls(time.monotonic() + timeout_s)

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - time.monotonic())


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with jitter, never shorter than the server asks for."""

    max_retries: int = 2
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 5.0

    def delay_s(self, error: TandemError, num_retries: int, remaining_s: float) -> float | None:
        """Seconds to wait before the next attempt; None to give up."""
        if num_retries >= self.max_retries or not isinstance(error, RETRYABLE):
            return None
        backoff_s = min(self.max_backoff_s, self.initial_backoff_s * 2**num_retries)
        jitter = random.uniform(0.5, 1.0)
        asked_s = error.retry_after_s if isinstance(error, Overloaded) else None
        # Clients that were refused together must not come back together: they spread out behind the time asked for.
        delay_s = backoff_s * jitter if asked_s is None else asked_s + backoff_s * jitter
        return delay_s if delay_s < remaining_s else None


async def retrying(attempt: Callable[[], Awaitable[T]], policy: RetryPolicy, deadline: Deadline) -> T:
    """Await `attempt()` until it returns, or raises something that another attempt cannot cure."""
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
