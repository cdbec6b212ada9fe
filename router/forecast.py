"""What the router expects of the mesh, from what it has seen of it: how long until a first token, or a free permit.

    joins the queue ── tokens ahead of it / tokens per second that leave the queue, and one step more ──▶ placed
    placed ── as long as first tokens have taken lately, prefill and transfer included ──▶ first token

Rates are measured only while there is work, so they are what the mesh can do and not what it was asked to do; which of
its parts is the narrow one, prefill or room on decode workers, makes no difference. Nothing is known at the start, and
what is old is forgotten: a forecast that has become too dark would otherwise refuse the very requests that could prove
it wrong. For the same reason a request that need not wait is never judged by it.
"""

from collections.abc import Callable

_FORGET_S = 30.0
# How many events an average goes back over, about.
_WINDOW = 32
_SHORTEST_S = 1e-6
# Waits are taken for this much longer: who is refused early loses nothing, who waits in vain loses time.
_HEADROOM = 1.2
_SHORTEST_RETRY_S, _LONGEST_RETRY_S = 0.1, 60.0

Clock = Callable[[], float]


class BusyRate:
    """Work done per second of busy time, and how evenly. The last events count most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._work = 0.0
        self._busy_s = 0.0
        self._squared_gaps = 0.0
        self._since_s: float | None = None  # the last event of a busy time; None while idle
        self._known_at_s = 0.0

    def begin(self) -> None:
        """There is work from now on."""
        if self._since_s is None:
            self._since_s = self._clock()

    def did(self, work: float) -> None:
        """Some of it is done. Counts only in a busy time."""
        if self._since_s is None:
            return
        now_s, keep = self._clock(), 1 - 1 / _WINDOW
        gap_s = now_s - self._since_s
        self._work = self._work * keep + work
        self._busy_s = self._busy_s * keep + gap_s
        self._squared_gaps = self._squared_gaps * keep + gap_s**2
        self._since_s = self._known_at_s = now_s

    def end(self) -> None:
        """There is none any more."""
        if self._since_s is not None:
            self._busy_s += self._clock() - self._since_s
            self._since_s = None

    def wait_s(self, work_ahead: float) -> float | None:
        """Until this is done, and then the next piece of work; None if nobody knows. Grows while nothing gets done.

        The last step is taken for a whole gap between events, as long as it is where one looks at random, which is
        the long gaps: work is often done in batches.
        """
        now_s = self._clock()
        if not self._work or (self._since_s is None and now_s - self._known_at_s > _FORGET_S):
            return None
        stalled_s = 0.0 if self._since_s is None else now_s - self._since_s
        busy_s = self._busy_s + stalled_s
        return work_ahead * busy_s / self._work + (self._squared_gaps + stalled_s**2) / max(busy_s, _SHORTEST_S)


class Latency:
    """Seconds that something takes: mean and mean deviation, smoothed as in RFC 6298."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._mean_s: float | None = None
        self._deviation_s = 0.0
        self._mean_size = 0.0
        self._known_at_s = 0.0

    def took(self, seconds: float, size: int) -> None:
        """Measured once, for something of this size."""
        self._known_at_s = self._clock()
        if self._mean_s is None:
            self._mean_s, self._deviation_s, self._mean_size = seconds, seconds / 2, size
            return
        self._deviation_s += (abs(seconds - self._mean_s) - self._deviation_s) / 4
        self._mean_s += (seconds - self._mean_s) / 8
        self._mean_size += (size - self._mean_size) / 8

    def expected_s(self, size: int) -> float:
        """Seldom exceeded; longer for what is larger than usual; 0 if nobody knows."""
        if self._mean_s is None or self._clock() - self._known_at_s > _FORGET_S:
            return 0.0
        return (self._mean_s + 2 * self._deviation_s) * max(1.0, size / self._mean_size)


class Forecast:
    """One for all requests of a router. `clock` gives monotonic seconds. Others tell it what happens."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.queue = BusyRate(clock)
        """Tokens that leave the queue for workers, while somebody waits in it."""
        self.service = BusyRate(clock)
        """Choices that end, for whatever reason, while any is in service."""
        self.first_token = Latency(clock)
        """From placement to first token, by the number of tokens to prefill."""

    def placed(self, num_tokens: int) -> Callable[[], None]:
        """A request leaves for its workers, from the queue or past it. Call what this returns at its first token."""
        placed_at_s = self._clock()
        self.queue.did(num_tokens)
        return lambda: self.first_token.took(self._clock() - placed_at_s, num_tokens)

    def first_token_s(self, num_tokens_ahead: int, num_tokens: int) -> float | None:
        """Until the first token of a request of `num_tokens` that has this much before it; None if nobody knows."""
        queued_s = self.queue.wait_s(num_tokens_ahead)
        return None if queued_s is None else _HEADROOM * queued_s + self.first_token.expected_s(num_tokens)

    def permits_s(self, count: int) -> float | None:
        """Until this many permits will have become free; None if nobody knows."""
        return self.service.wait_s(count - 1)


def retry_after_s(expected_s: float | None, otherwise_s: float = 1.0) -> float:
    """What to tell a client that is refused: the time expected, within reason; `otherwise_s` if nobody knows."""
    if expected_s is None:
        return otherwise_s
    return min(max(expected_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)
