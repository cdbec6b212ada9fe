"""Recent incidents and requests, for operators. Kept in memory only; the access log has the full history.

No I/O; `clock` is the registry's monotonic clock, in seconds.
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
from router.generation.choice import Choice
from router.observe.timeline import AttemptWorkers, Timeline, Timing
from router.workers.health import BreakerTrip
from router.workers.membership import WorkerView

_MAX_INCIDENTS = 50  # of workers, and as many of requests
_MAX_TRACES = 25
_MAX_RUNNING = 50

CANCELLED = "CancelledError"
"""The error name of a choice whose client has left, which does not count as a failure."""


class IncidentKind(Enum):
    """Kinds of incidents, of workers and of requests."""

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
    """An event of a worker, of a request, or of a request at a worker. `at_s` is on the journal's clock."""

    at_s: float
    kind: IncidentKind
    worker_id: str = ""
    request_id: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A choice that ended at `at_s` or, if it still runs, arrived at `at_s`.

    `error` is the name of the error it ended with, or "". `events_s` are its lifetime events in seconds since arrival.
    """

    at_s: float
    request_id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None
    error: str
    timing: Timing | None
    attempt_workers: tuple[AttemptWorkers, ...]
    events_s: Mapping[str, float]


class JournalReader(Protocol):
    """Gets every event at once; must not block. Plug point: RouterMetrics."""

    def noted(self, incident: Incident) -> None:
        """An incident was recorded."""
        ...

    def refused(self, error: str) -> None:
        """A request was refused with the error of this name before any choice started."""
        ...

    def ended(self, trace: Trace) -> None:
        """A choice has ended."""
        ...


class Journal:
    """One instance per router. Counts are since its start."""

    def __init__(self, clock: Callable[[], float], readers: Iterable[JournalReader] = ()) -> None:
        self._clock = clock
        self._readers = tuple(readers)
        # Two deques, so that many replays do not push out the incidents of workers.
        self._worker_incidents: deque[Incident] = deque(maxlen=_MAX_INCIDENTS)
        self._request_incidents: deque[Incident] = deque(maxlen=_MAX_INCIDENTS)
        self._traces: deque[Trace] = deque(maxlen=_MAX_TRACES)
        self._states: dict[str, WorkerState] = {}
        self._running: dict[Choice, Timeline] = {}
        self.num_ended = 0
        self.num_failed = 0
        self.num_replays = 0

    @property
    def incidents(self) -> list[Incident]:
        """Newest first, up to a fixed number."""
        return sorted((*self._worker_incidents, *self._request_incidents), key=lambda incident: incident.at_s)[::-1]

    @property
    def running(self) -> list[Trace]:
        """Running choices in their current state, oldest first."""
        now_s, oldest = self._clock(), islice(self._running.items(), _MAX_RUNNING)
        return [_trace(choice, timeline, now_s - timeline.age_s, timeline.timing_now()) for choice, timeline in oldest]

    @property
    def traces(self) -> list[Trace]:
        """Newest first, up to a fixed number."""
        return list(reversed(self._traces))

    def follow(self, views: Iterable[WorkerView]) -> None:
        """Compare the workers with those of the last call and record what has changed."""
        states: dict[str, WorkerState] = {}
        for view in views:
            incarnation = view.info.incarnation
            states[incarnation] = view.state
            if incarnation not in self._states:
                self._note(IncidentKind.JOINED, worker_id=view.info.worker_id)
            elif self._states[incarnation] is not view.state:
                self._note(_OF_STATE[view.state], worker_id=view.info.worker_id)
        self._states = states

    def tripped(self, trip: BreakerTrip) -> None:
        """Record that a worker's circuit breaker has tripped."""
        self._note(IncidentKind.TRIPPED, worker_id=trip.info.worker_id, cause=f"{trip.num_failures} failures in a row")

    def replayed(self, choice: Choice, error: Replayable, blamed: WorkerInfo | None) -> None:
        """Record that an attempt has failed, before another attempt or the request's end."""
        self.num_replays += 1
        worker_id = "" if blamed is None else blamed.worker_id
        self._note(IncidentKind.REPLAYED, worker_id=worker_id, request_id=choice.request_id, cause=type(error).__name__)

    def began(self, choice: Choice, timeline: Timeline) -> None:
        """Record that a choice is in service."""
        self._running[choice] = timeline

    def ended(self, choice: Choice, timeline: Timeline, error: str | None) -> Trace:
        """Record that a choice has ended; `error` is the name of its error, None without one."""
        self._running.pop(choice, None)
        self.num_ended += 1
        if error is not None and error != CANCELLED:
            self.num_failed += 1
            self._note(IncidentKind.FAILED, request_id=choice.request_id, cause=error)
        timing = timeline.timing() if timeline.attempt_workers else None
        trace = replace(_trace(choice, timeline, self._clock(), timing), error=error or "")
        self._traces.append(trace)
        for reader in self._readers:
            reader.ended(trace)
        return trace

    def refused(self, error: str) -> None:
        """A request was refused with the error of this name before any choice started."""
        for reader in self._readers:
            reader.refused(error)

    def _note(self, kind: IncidentKind, *, worker_id: str = "", request_id: str = "", cause: str = "") -> None:
        incident = Incident(self._clock(), kind, worker_id, request_id, cause)
        (self._request_incidents if request_id else self._worker_incidents).append(incident)
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
        attempt_workers=timeline.attempt_workers,
        events_s=timeline.events_s,
    )
