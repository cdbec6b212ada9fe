"""What has happened lately, for operators: incidents and ended requests, the newest of each. Kept in memory only; the
access log has the rest. No I/O; `clock` gives the registry's monotonic seconds.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Protocol

from mesh.domain.errors import Replayable
from mesh.domain.tokens import FinishReason
from mesh.domain.worker import WorkerInfo, WorkerState
from mesh.registry.membership import WorkerView
from router.choice import Choice
from router.phases import Timing
from router.proving import Trip
from router.timeline import Stop, Timeline

_MAX_INCIDENTS = 50
_MAX_TRACES = 25
_MAX_RUNNING = 50

CANCELLED = "CancelledError"
"""What a choice ends with whose client has left. That is no failure."""


class IncidentKind(Enum):
    """What operators want to know of."""

    JOINED = "joined"
    READY = "ready"
    DRAINING = "draining"
    STALLED = "stalled"
    LOST = "lost"
    TRIPPED = "tripped"
    REPLAYED = "replayed"
    FAILED = "failed"


_OF_STATE = {
    WorkerState.READY: IncidentKind.READY,
    WorkerState.DRAINING: IncidentKind.DRAINING,
    WorkerState.STALLED: IncidentKind.STALLED,
    WorkerState.LOST: IncidentKind.LOST,
}


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happened to a worker, to a request, or to a request at a worker."""

    at_s: float
    kind: IncidentKind
    worker_id: str = ""
    request_id: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A choice that ended at `at_s`; or, if it runs, one that came in then. `error` is the name of what it ended with;
    `stops` are its attempts' workers; `events_s` are its lifetime events in seconds since it came in."""

    at_s: float
    request_id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None
    error: str
    timing: Timing | None
    stops: tuple[Stop, ...]
    events_s: Mapping[str, float]


class JournalReader(Protocol):
    """Hears of everything as it happens; must not block. Plug point: RouterMetrics."""

    def noted(self, incident: Incident) -> None:
        """Something has happened."""
        ...

    def refused(self, error: str) -> None:
        """A request ended with this error before it began."""
        ...

    def ended(self, trace: Trace) -> None:
        """A choice is over."""
        ...


class Journal:
    """One for each router. Counts are since its start."""

    def __init__(self, clock: Callable[[], float], readers: Iterable[JournalReader] = ()) -> None:
        self._clock = clock
        self._readers = tuple(readers)
        self._incidents: deque[Incident] = deque(maxlen=_MAX_INCIDENTS)
        self._traces: deque[Trace] = deque(maxlen=_MAX_TRACES)
        self._states: dict[str, WorkerState] = {}
        self._running: dict[Choice, Timeline] = {}
        self.num_ended = 0
        self.num_failed = 0
        self.num_replays = 0

    @property
    def incidents(self) -> list[Incident]:
        """Newest first."""
        return list(reversed(self._incidents))

    @property
    def running(self) -> list[Trace]:
        """As far as they have come, oldest first."""
        now_s, oldest = self._clock(), islice(self._running.items(), _MAX_RUNNING)
        return [_trace(choice, timeline, now_s - timeline.age_s, timeline.timing_now()) for choice, timeline in oldest]

    @property
    def traces(self) -> list[Trace]:
        """Newest first."""
        return list(reversed(self._traces))

    def follow(self, views: Iterable[WorkerView]) -> None:
        """These are the workers now."""
        states: dict[str, WorkerState] = {}
        for view in views:
            incarnation = view.info.incarnation
            states[incarnation] = view.state
            if incarnation not in self._states:
                self._note(IncidentKind.JOINED, worker_id=view.info.worker_id)
            elif self._states[incarnation] is not view.state:
                self._note(_OF_STATE[view.state], worker_id=view.info.worker_id)
        self._states = states

    def tripped(self, trip: Trip) -> None:
        """A worker has lost the router's trust."""
        self._note(IncidentKind.TRIPPED, worker_id=trip.info.worker_id, cause=f"{trip.num_failures} failures in a row")

    def replayed(self, choice: Choice, error: Replayable, blamed: WorkerInfo | None) -> None:
        """An attempt has failed; another one follows, or the request's end."""
        self.num_replays += 1
        worker_id = "" if blamed is None else blamed.worker_id
        self._note(IncidentKind.REPLAYED, worker_id=worker_id, request_id=choice.request_id, cause=type(error).__name__)

    def began(self, choice: Choice, timeline: Timeline) -> None:
        """A choice is in service."""
        self._running[choice] = timeline

    def ended(self, choice: Choice, timeline: Timeline, error: str | None) -> Trace:
        """A choice is over; `error` is the name of what it ended with."""
        self._running.pop(choice, None)
        self.num_ended += 1
        if error is not None and error != CANCELLED:
            self.num_failed += 1
            self._note(IncidentKind.FAILED, request_id=choice.request_id, cause=error)
        timing = timeline.timing() if timeline.stops else None
        trace = replace(_trace(choice, timeline, self._clock(), timing), error=error or "")
        self._traces.append(trace)
        for reader in self._readers:
            reader.ended(trace)
        return trace

    def refused(self, error: str) -> None:
        """A request ended with this error before it began."""
        for reader in self._readers:
            reader.refused(error)

    def _note(self, kind: IncidentKind, *, worker_id: str = "", request_id: str = "", cause: str = "") -> None:
        incident = Incident(self._clock(), kind, worker_id, request_id, cause)
        self._incidents.append(incident)
        for reader in self._readers:
            reader.noted(incident)


def _trace(choice: Choice, timeline: Timeline, at_s: float, timing: Timing | None) -> Trace:
    return Trace(
        at_s=at_s,
        request_id=choice.request_id,
        prompt_tokens=choice.num_prompt_tokens,
        completion_tokens=len(choice.token_ids),
        cached_tokens=choice.cached_tokens or 0,
        finish_reason=choice.finish_reason,
        error="",
        timing=timing,
        stops=timeline.stops,
        events_s=timeline.events_s,
    )
