"""When what happened to a request: its lifetime events, for the access log.

Events: queued, prefill_started, prefill_finished, transfer_started, transfer_finished, decode_started, first_token,
finished. Of repeated ones (replays) the first counts.
"""

from collections.abc import Callable


class Timeline:
    """Milliseconds since the request came in. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin_s = clock()
        self._events: dict[str, float] = {}

    def mark(self, event: str) -> None:
        """Something happens now."""
        if event not in self._events:
            self._events[event] = self._clock() - self._begin_s

    def as_fields(self) -> dict[str, float]:
        """`{event_ms: milliseconds}`, in order."""
        return {f"{event}_ms": round(at_s * 1000, 2) for event, at_s in self._events.items()}

    def copy(self) -> "Timeline":
        """For another choice of the same request."""
        twin = Timeline(self._clock)
        twin._begin_s, twin._events = self._begin_s, dict(self._events)
        return twin
