"""Rate limit for log lines of one cause: a burst of a few lines, then one a second. The next line that is logged
reports how many were suppressed.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

_MAX_CAUSES = 1000
_OVERDUE_S = 5.0


@dataclass(slots=True)
class _Bucket:
    allowance: float
    updated_s: float
    num_suppressed: int = 0


class LogLimit:
    """A token bucket per cause, for the last _MAX_CAUSES causes."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, burst: float = 5, lines_per_s: float = 1.0
    ) -> None:
        self._clock = clock
        self._burst = burst
        self._lines_per_s = lines_per_s
        self._buckets: dict[Hashable, _Bucket] = {}
        self.num_suppressed = 0

    def admit(self, cause: Hashable) -> int | None:
        """Return None if the line must be suppressed, else the number of lines suppressed since the last one."""
        now_s = self._clock()
        bucket = self._buckets.get(cause)
        if bucket is None:
            if len(self._buckets) >= _MAX_CAUSES:
                self._buckets.pop(next(iter(self._buckets)), None)
            bucket = self._buckets[cause] = _Bucket(self._burst, now_s)
        bucket.allowance = min(self._burst, bucket.allowance + self._lines_per_s * (now_s - bucket.updated_s))
        bucket.updated_s = now_s
        if bucket.allowance < 1:
            bucket.num_suppressed += 1
            self.num_suppressed += 1
            return None
        bucket.allowance -= 1
        num_suppressed, bucket.num_suppressed = bucket.num_suppressed, 0
        return num_suppressed

    def overdue(self) -> list[tuple[Hashable, int]]:
        """Take the unreported counts of causes that have been silent for _OVERDUE_S."""
        return self._take(self._clock() - _OVERDUE_S)

    def all_suppressed(self) -> list[tuple[Hashable, int]]:
        """Take the unreported counts of all causes, before the process ends."""
        return self._take(self._clock())

    def _take(self, until_s: float) -> list[tuple[Hashable, int]]:
        unreported = [
            (cause, bucket.num_suppressed)
            for cause, bucket in list(self._buckets.items())
            if bucket.num_suppressed and bucket.updated_s <= until_s
        ]
        for cause, _ in unreported:
            self._buckets.pop(cause, None)
        return unreported
