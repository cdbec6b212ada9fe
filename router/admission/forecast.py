"""Forecasts from measurements, which say when to try again: how long until a first token, or until permits become free.

    enqueued ── tokens ahead / tokens per second that leave the queue, and one more step ──▶ placed
    placed ── as long as recent first tokens took, prefill and transfer included ──▶ first token

Rates are measured only while there is work, so they show the mesh's capacity and not its load; it does not matter
whether prefill or decode capacity is the bottleneck. At the start nothing is known, and old measurements expire:
otherwise a forecast that is too pessimistic would refuse the very requests that could correct it. For the same reason a
request that need not wait is never refused by the forecast.
"""

from collections.abc import Callable

_FORGET_S = 30.0
# Approximate number of events that an average covers.
_WINDOW = 32
_SHORTEST_S = 1e-6
# Forecast waits are multiplied by this: an early refusal costs a client nothing, a wait in vain costs time.
_HEADROOM = 1.2
_SHORTEST_RETRY_S, _LONGEST_RETRY_S = 0.1, 60.0

Clock = Callable[[], float]


class BusyRate:
    """The rate of work per second of busy time, and its regularity. Recent events weigh most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._work = 0.0
        self._busy_s = 0.0
        self._squared_gaps = 0.0
        self._since_s: float | None = None  # the last event of a busy time; None while idle
        self._known_at_s = 0.0

    def begin(self) -> None:
        """A busy time starts: there is work. Idempotent."""
        if self._since_s is None:
            self._since_s = self._clock()

    def did(self, work: float) -> None:
        """Count finished work. Ignored outside a busy time."""
        if self._since_s is None:
            return
        now_s, keep = self._clock(), 1 - 1 / _WINDOW
        gap_s = now_s - self._since_s
        self._work = self._work * keep + work
        self._busy_s = self._busy_s * keep + gap_s
        self._squared_gaps = self._squared_gaps * keep + gap_s**2
        self._since_s = self._known_at_s = now_s

    def end(self) -> None:
        """The busy time ends: no work is left. Idempotent."""
        if self._since_s is not None:
            self._busy_s += self._clock() - self._since_s
            self._since_s = None

    def wait_s(self, work_ahead: float) -> float | None:
        """Seconds until this work and the next piece of work are done; None if unknown. Grows while nothing is done.

        The last step counts as a whole gap between events, as seen from a random moment, which more likely falls into a
        long gap: work is often done in batches.
        """
        now_s = self._clock()
        if not self._work or (self._since_s is None and now_s - self._known_at_s > _FORGET_S):
            return None
        stalled_s = 0.0 if self._since_s is None else now_s - self._since_s
        busy_s = self._busy_s + stalled_s
        return work_ahead * busy_s / self._work + (self._squared_gaps + stalled_s**2) / max(busy_s, _SHORTEST_S)


class Latency:
    """Smoothed mean and mean deviation of a duration, as in RFC 6298."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._mean_s: float | None = None
        self._deviation_s = 0.0
        self._mean_size = 0.0
        self._known_at_s = 0.0

    def record(self, seconds: float, size: int) -> None:
        """Add a measurement for work of this size."""
        self._known_at_s = self._clock()
        if self._mean_s is None:
            self._mean_s, self._deviation_s, self._mean_size = seconds, seconds / 2, size
            return
        self._deviation_s += (abs(seconds - self._mean_s) - self._deviation_s) / 4
        self._mean_s += (seconds - self._mean_s) / 8
        self._mean_size += (size - self._mean_size) / 8

    def expected_s(self, size: int) -> float:
        """A rarely exceeded duration in seconds; longer for sizes above the mean; 0 if unknown."""
        if self._mean_s is None or self._clock() - self._known_at_s > _FORGET_S:
            return 0.0
        return (self._mean_s + 2 * self._deviation_s) * max(1.0, size / self._mean_size)


class Forecast:
    """The measurements of one model. `clock` returns monotonic seconds. The queue and the service report to it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.queue = BusyRate(clock)
        """Tokens that leave the queue for workers, measured while requests wait for capacity."""
        self.service = BusyRate(clock)
        """Choices that end, for any reason, measured while any is in service."""
        self.first_token = Latency(clock)
        """Seconds from placement to first token, by the number of tokens to prefill."""

    def placed(self, num_tokens: int) -> Callable[[], None]:
        """Record that a request is placed. The caller must call the returned function at its first token."""
        placed_at_s = self._clock()
        self.queue.did(num_tokens)
        return lambda: self.first_token.record(self._clock() - placed_at_s, num_tokens)

    def first_token_s(self, num_tokens_ahead: int, num_tokens: int) -> float | None:
        """Seconds until the first token of a request with this many tokens ahead of it; None if unknown."""
        queued_s = self.queue.wait_s(num_tokens_ahead)
        return None if queued_s is None else _HEADROOM * queued_s + self.first_token.expected_s(num_tokens)

    def permits_s(self, count: int) -> float | None:
        """Seconds until this many permits will have become free; None if unknown."""
        return self.service.wait_s(count - 1)


def retry_after_s(expected_s: float | None, default_s: float = 1.0) -> float:
    """Return the retry-after of a refusal: the expected time, clamped, or `default_s` if it is unknown."""
    if expected_s is None:
        return default_s
    return min(max(expected_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)
