"""Replay, the mesh's only recovery: how often, how soon, and on which workers not.

A failed attempt is followed by another one with the tokens generated so far. Consecutive attempts without a new token
are counted. So are workers lost under the request, because a request that crashes workers must not be retried forever.

The first replay after progress is free and, if a worker was lost, immediate: all streams of a dead worker move at once.
Later replays draw on one budget per model and wait for it rather than fail, so that no failure causes a storm.
"""

import asyncio
from collections.abc import Callable

from mesh.domain.errors import (
    AttemptsFailed,
    MeshError,
    Overloaded,
    Replayable,
    SequencePreempted,
    WorkerBusy,
    WorkerLost,
)
from mesh.domain.worker import WorkerInfo
from router.settings import RouterSettings

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
# After this many failures in a row the decode worker prefills itself: the network between workers may be down.
_PREFILL_LOCALLY_AFTER = 3


class Replay:
    """The failures of one choice. `avoid` holds incarnations of workers that failed it since its last progress."""

    def __init__(self, settings: RouterSettings) -> None:
        self.attempt = 0
        self.avoid: frozenset[str] = frozenset()
        self._max_attempts = settings.max_attempts
        self._max_losses = settings.max_worker_losses
        self._num_tokens = 0
        self._num_failures = 0
        self._num_losses = 0

    @property
    def is_free(self) -> bool:
        """True if the next attempt does not draw on the budget."""
        return self._num_failures <= 1

    @property
    def prefill_locally(self) -> bool:
        """True if the next attempt should use no prefill worker."""
        return self._num_failures >= _PREFILL_LOCALLY_AFTER

    def after(self, error: Replayable, *, num_tokens: int, blamed: WorkerInfo | None) -> float:
        """Count a failure and return the minimum seconds to wait before the next attempt.

        `num_tokens` is the choice's number of tokens by now. Raises the final error if there is no next attempt.
        """
        if num_tokens > self._num_tokens:
            self._num_tokens, self._num_failures, self._num_losses = num_tokens, 0, 0
            self.avoid = frozenset()
        self.attempt += 1
        self._num_failures += 1
        self._num_losses += isinstance(error, WorkerLost)
        if blamed is not None:
            self.avoid |= {blamed.incarnation}
        if self._num_failures >= self._max_attempts or self._num_losses >= self._max_losses:
            raise self._final(error) from error
        return self._backoff_s(error)

    def _backoff_s(self, error: Replayable) -> float:
        """The first failure is replayed at once, unless workers lacked capacity."""
        num_waits = self._num_failures - (0 if isinstance(error, WorkerBusy | SequencePreempted) else 1)
        return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (num_waits - 1)) if num_waits else 0.0

    def _final(self, error: Replayable) -> MeshError:
        if isinstance(error, WorkerBusy | SequencePreempted):
            return Overloaded(f"no worker had capacity in {self._num_failures} attempts; try again later")
        return AttemptsFailed(f"workers failed this request {self._num_failures} times in a row")


class ReplayBudget:
    """A token bucket for replays without progress, shared by all requests. `clock` returns monotonic seconds.

    `burst` is the capacity of the bucket, `per_s` its refill rate.
    """

    def __init__(self, clock: Callable[[], float], *, burst: int, per_s: float) -> None:
        self._clock = clock
        self._burst = burst
        self._per_s = per_s
        self._num_tokens = float(burst)  # below zero: tokens promised to waiting replays
        self._counted_at_s = clock()

    async def draw(self) -> None:
        """Wait for a token, first come, first served. A cancelled caller returns its token."""
        try:
            await asyncio.sleep(self.take_s())
        except asyncio.CancelledError:
            self.give_back()
            raise

    def take_s(self) -> float:
        """Take a token and return the seconds until it is available."""
        now_s = self._clock()
        refilled = self._num_tokens + (now_s - self._counted_at_s) * self._per_s
        self._num_tokens, self._counted_at_s = min(self._burst, refilled) - 1, now_s
        return max(0.0, -self._num_tokens / self._per_s)

    def give_back(self) -> None:
        """Return an unused token."""
        self._num_tokens += 1
