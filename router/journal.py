"""The record of a router's requests: recent incidents and traces for operators, and the spans of choices.

The journal is kept in memory only; the access log has the full history. The journal does no I/O; `clock` returns
monotonic seconds. A ChoiceSpan begins with its choice; its child spans, the phases, are made from the journal's trace
when the choice has ended. OpenTelemetry sends spans from a thread of its own.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from itertools import islice
from typing import Protocol

from opentelemetry import trace
from opentelemetry.trace import SpanKind

from mesh.domain.errors import MeshError, Replayable
from mesh.domain.tokens import FinishReason
from mesh.domain.worker import WorkerInfo, WorkerRole, WorkerState
from mesh.tracing import context_in, mark_failed, trace_id_of, traceparent_of
from router.choice import Choice
from router.timeline import AttemptTiming, AttemptWorkers, Timeline, Timing
from router.workers.membership import WorkerView

_MAX_INCIDENTS = 50  # of workers, and as many of requests
_MAX_TRACES = 25
_MAX_RUNNING = 50

CANCELLED = "CancelledError"
"""The error name of a choice whose client has left, which does not count as a failure."""

_NS = 1_000_000_000


class IncidentKind(Enum):
    """Kinds of incidents, of workers and of requests. That a worker has another state has the name of the state."""

    JOINED = "joined"
    READY = "ready"
    DRAINING = "draining"
    STALLED = "stalled"
    LOST = "lost"
    TRIPPED = "tripped"
    REPLAYED = "replayed"
    FAILED = "failed"
    SWITCHED = "switched"
    STOPPED = "stopped"


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
    events_s: Mapping[str, float]


class JournalReader(Protocol):
    """Gets every event at once; must not block. Plug point: RouterMetrics, and History."""

    def noted(self, incident: Incident) -> None:
        """An incident was recorded, such as a replay."""
        ...

    def refused(self, error: str) -> None:
        """A request was refused with the error of this name before any choice started."""
        ...

    def ended(self, trace: Trace) -> None:
        """A choice has ended, for whatever reason."""
        ...


class Journal:
    """Records incidents and traces, and counts how choices end. One per router; counts are since its start."""

    def __init__(self, clock: Callable[[], float], readers: Iterable[JournalReader] = ()) -> None:
        self._clock = clock
        self._readers = tuple(readers)
        # Two deques, so that many replays do not push out the incidents of workers.
        self._worker_incidents: deque[Incident] = deque(maxlen=_MAX_INCIDENTS)
        self._request_incidents: deque[Incident] = deque(maxlen=_MAX_INCIDENTS)
        self._traces: deque[Trace] = deque(maxlen=_MAX_TRACES)
        self._states: dict[str, WorkerState] = {}
        self._roles: dict[str, WorkerRole] = {}
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
        return [_trace(choice, timeline, now_s - timeline.age_s, timeline.timing()) for choice, timeline in oldest]

    @property
    def traces(self) -> list[Trace]:
        """Newest first, up to a fixed number."""
        return list(reversed(self._traces))

    def note_worker(self, view: WorkerView) -> None:
        """Record what has changed about a worker since the last call."""
        incarnation, worker_id, role = view.info.incarnation, view.info.worker_id, view.info.role
        if self._roles.get(worker_id, role) is not role:
            self._note(IncidentKind.SWITCHED, worker_id=worker_id, cause=f"{role.value} from now on")
        elif incarnation not in self._states:
            self._note(IncidentKind.JOINED, worker_id=worker_id)
        elif self._states[incarnation] is not view.state and view.state is not WorkerState.SWITCHING:
            self._note(IncidentKind(view.state.value), worker_id=worker_id)
        self._states[incarnation], self._roles[worker_id] = view.state, role

    def keep(self, views: Iterable[WorkerView]) -> None:
        """Forget all workers but these."""
        infos = [view.info for view in views]
        incarnations, names = {info.incarnation for info in infos}, {info.worker_id for info in infos}
        self._states = {key: state for key, state in self._states.items() if key in incarnations}
        self._roles = {key: role for key, role in self._roles.items() if key in names}

    def tripped(self, info: WorkerInfo, num_failures: int) -> None:
        """Record that a worker's circuit breaker has tripped, after this many failures."""
        self._note(IncidentKind.TRIPPED, worker_id=info.worker_id, cause=f"{num_failures} failures in a row")

    def replayed(self, choice: Choice, error: Replayable, blamed: WorkerInfo | None) -> None:
        """Record that an attempt has failed, and another one follows."""
        self.num_replays += 1
        worker_id = "" if blamed is None else blamed.worker_id
        self._note(IncidentKind.REPLAYED, worker_id=worker_id, request_id=choice.request_id, cause=type(error).__name__)

    def began(self, choice: Choice, timeline: Timeline) -> None:
        """Record that a choice is in service."""
        self._running[choice] = timeline

    def ended(self, choice: Choice, timeline: Timeline, error: str | None) -> Trace:
        """Record that a choice has ended; `error` is the name of its error, None without one."""
        self._running.pop(choice, None)
        timeline.end_attempt()
        self.num_ended += 1
        if error is not None and error != CANCELLED:
            self.num_failed += 1
            self._note(IncidentKind.FAILED, request_id=choice.request_id, cause=error)
        trace = replace(_trace(choice, timeline, self._clock(), timeline.timing()), error=error or "")
        self._traces.append(trace)
        for reader in self._readers:
            reader.ended(trace)
        return trace

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """An error of the mesh within the block refuses a request before any choice has started."""
        try:
            yield
        except MeshError as error:
            for reader in self._readers:
                reader.refused(type(error).__name__)
            raise

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
        events_s=timeline.events_s,
    )


class ChoiceSpan:
    """The span of one choice; its request arrived `age_s` ago. `traceparent` is the parent of workers' spans."""

    def __init__(self, trace_headers: Mapping[str, str], request_id: str, *, age_s: float) -> None:
        self._start_ns = time.time_ns() - round(age_s * _NS)
        self._tracer = trace.get_tracer("tandem.router")
        self._span = self._tracer.start_span(
            "generate",
            context_in(trace_headers),
            SpanKind.SERVER,
            {"tandem.request_id": request_id},
            start_time=self._start_ns,
        )
        self.traceparent = traceparent_of(self._span)
        self.trace_id = trace_id_of(self._span)

    def end(self, ended: Trace) -> None:
        """End the span with the choice's trace."""
        if self._span.is_recording():
            self._describe(ended)
        self._span.end(self._start_ns + round(ended.events_s["finished"] * _NS))

    def _describe(self, ended: Trace) -> None:
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": ended.prompt_tokens,
                "gen_ai.usage.output_tokens": ended.completion_tokens,
                "tandem.cached_tokens": ended.cached_tokens,
                "tandem.finish_reason": ended.finish_reason.value if ended.finish_reason else "",
                "tandem.attempts": len(ended.timing.attempts) if ended.timing else 0,
            }
        )
        if ended.error and ended.error != CANCELLED:
            mark_failed(self._span, ended.error)
        if ended.timing is None:
            return
        self._add("prepare", 0.0, ended.timing.prepare_s, {})
        at_s = ended.timing.prepare_s
        for number, attempt in enumerate(ended.timing.attempts):
            self._add_attempt(at_s, attempt, {**_attributes(attempt.workers), "tandem.attempt": number})
            at_s += attempt.total_s

    def _add_attempt(self, at_s: float, timing: AttemptTiming, attributes: Mapping[str, str | int]) -> None:
        """Add spans of non-empty phases. The transfer's span includes the part hidden behind computing the prompt."""
        for name, phase_s in asdict(timing.phases).items():
            phase, end_s = name.removesuffix("_s"), at_s + phase_s
            if phase == "transfer" and timing.kv_transfer_s is not None:
                self._add(phase, end_s - timing.kv_transfer_s, end_s, attributes)
            elif phase_s > 0:
                self._add(phase, at_s, end_s, attributes)
            at_s = end_s

    def _add(self, name: str, begin_s: float, end_s: float, attributes: Mapping[str, str | int]) -> None:
        span = self._tracer.start_span(
            name,
            trace.set_span_in_context(self._span),
            attributes=attributes,
            start_time=self._start_ns + round(begin_s * _NS),
        )
        span.end(self._start_ns + round(end_s * _NS))


def _attributes(workers: AttemptWorkers) -> dict[str, str]:
    values = {"prefill_worker": workers.prefill, "decode_worker": workers.decode, "failure": workers.failure}
    return {f"tandem.{key}": value for key, value in values.items() if value}
