"""When what happened to a request: its lifetime events, for the access log, and their phases, for the client.

Events: queued, placed, prefill_started, prefill_finished, transfer_started, transfer_finished, decode_started,
first_token, finished. Of repeated ones (replays) the access log has the first; phases are kept for each attempt.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from router.phases import AttemptEvents, Timing, timing_of


@dataclass(slots=True)
class Stop:
    """The workers of one attempt by name, "" where there is none, and the name of the error it failed with."""

    prefill: str = ""
    decode: str = ""
    failure: str = ""


class Timeline:
    """Seconds since the request came in. `clock` gives monotonic seconds; `on_gap` hears of each gap between tokens."""

    def __init__(self, clock: Callable[[], float], on_gap: Callable[[float], None] | None = None) -> None:
        self._clock = clock
        self._on_gap = on_gap
        self._last_token_s: float | None = None
        self._begin_s = clock()
        self._events: dict[str, float] = {}
        self._attempts: list[AttemptEvents] = []
        self._stops: list[Stop] = []
        self._current = AttemptEvents()

    def begin_attempt(self) -> None:
        """A new attempt is queued now."""
        self._current = AttemptEvents()
        self._attempts.append(self._current)
        self._stops.append(Stop())
        self.mark("queued")

    def note_workers(self, prefill: str, decode: str) -> None:
        """The attempt runs at these; "" for no prefill worker."""
        self._stops[-1].prefill, self._stops[-1].decode = prefill, decode

    def end_attempt(self, failure: str = "") -> None:
        """The attempt has failed, or is complete, now. Of repeated calls the first counts."""
        if self._current.ended_s is None:
            self._current.ended_s = self._now_s()
            if self._stops:
                self._stops[-1].failure = failure

    def mark(self, event: str, *, ago_s: float = 0.0) -> None:
        """Something happens now, or did so as long ago as a worker says."""
        if event not in self._current.at_s:
            at_s = max(0.0, self._now_s() - ago_s)
            self._current.at_s[event] = at_s
            self._events.setdefault(event, at_s)

    def token_came(self, at_s: float) -> None:
        """One or more tokens have come together, at `at_s` of the clock."""
        last_s, self._last_token_s = self._last_token_s, at_s
        if last_s is None:
            self.mark("first_token")
        elif self._on_gap is not None:
            self._on_gap(at_s - last_s)

    def note_kv_transfer(self, duration_s: float | None) -> None:
        """How long the attempt's KV was on its way, as its sender has measured it."""
        self._current.kv_transfer_s = duration_s

    @property
    def stops(self) -> tuple[Stop, ...]:
        """One for each attempt."""
        return tuple(self._stops)

    @property
    def age_s(self) -> float:
        """Since the request came in."""
        return self._now_s()

    @property
    def events_s(self) -> dict[str, float]:
        """What happened when, each event where it came first."""
        return dict(self._events)

    def timing(self) -> Timing:
        """Where the time of a choice went whose last token has just come."""
        self.end_attempt()
        return timing_of(self._attempts, self._events.get("first_token", self._now_s()))

    def timing_now(self) -> Timing | None:
        """Where the time of a choice has gone so far; None if it has not reached the queue."""
        if not self._attempts:
            return None
        now_s = self._now_s()
        current = self._current if self._current.ended_s is not None else replace(self._current, ended_s=now_s)
        return timing_of([*self._attempts[:-1], current], self._events.get("first_token", now_s))

    def as_fields(self) -> dict[str, float]:
        """`{event_ms: milliseconds}`, in order, and the number of attempts."""
        times = {f"{event}_ms": round(at_s * 1000, 2) for event, at_s in self._events.items()}
        return {**times, "attempts": len(self._attempts)}

    def copy(self) -> "Timeline":
        """For another choice of the same request, before it is queued."""
        twin = Timeline(self._clock, self._on_gap)
        twin._begin_s = self._begin_s
        return twin

    def _now_s(self) -> float:
        return self._clock() - self._begin_s
