"""Delays between retries."""

import random


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
