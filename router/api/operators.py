"""The operators' views of a router: the public Mesh service, and the Prometheus metrics. Translation only.

The messages of Mesh are not those of mesh.v1, so that the mesh can change without its clients: workers have identity,
capacity and load, and nothing of the mesh's own protocol.

The metrics are named in the style of vLLM's; docs/observability.md lists them. They are updated from a choice's trace
when it has ended; only gaps between tokens are counted as they come.
"""

from collections import Counter as CountOf
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Protocol

import grpc
from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from mesh import wire
from mesh.domain.errors import (
    AttemptsFailed,
    DeadlineExceeded,
    InvalidRequest,
    NoWorkers,
    Overloaded,
    Replayable,
)
from mesh.domain.worker import WorkerInfo, WorkerLoad, WorkerRole, WorkerState
from mesh.metrics import SECONDS, TOKENS, Gaps, OnLoop, new_registry
from router.admission.in_flight import InFlightTable, Transfers
from router.admission.limiter import ConcurrencyLimiter
from router.admission.placement import InFlight, NoPlacement
from router.admission.queue import PlacementQueue
from router.api.tenants import CallerDirectory
from router.journal import CANCELLED, Incident, IncidentKind, Journal, Trace
from router.timeline import PHASES, AttemptTiming, Timing
from router.workers.health import MeshView
from router.workers.membership import WorkerView
from tandem.v1 import generation_pb2, mesh_pb2, mesh_pb2_grpc

_SHORTAGES: Mapping[NoPlacement | None, mesh_pb2.Shortage] = MappingProxyType(
    {
        NoPlacement.NO_DECODE_WORKER: mesh_pb2.SHORTAGE_DECODE_WORKER,
        NoPlacement.NO_DECODE_CAPACITY: mesh_pb2.SHORTAGE_DECODE_ROOM,
        NoPlacement.NO_PREFILL_CAPACITY: mesh_pb2.SHORTAGE_PREFILL_ROOM,
    }
)

_ROLES: Mapping[WorkerRole, mesh_pb2.WorkerRole] = MappingProxyType(
    {
        WorkerRole.PREFILL: mesh_pb2.WORKER_ROLE_PREFILL,
        WorkerRole.DECODE: mesh_pb2.WORKER_ROLE_DECODE,
    }
)
_STATES: Mapping[WorkerState, mesh_pb2.WorkerState] = MappingProxyType(
    {
        WorkerState.READY: mesh_pb2.WORKER_STATE_READY,
        WorkerState.DRAINING: mesh_pb2.WORKER_STATE_DRAINING,
        WorkerState.LOST: mesh_pb2.WORKER_STATE_LOST,
        WorkerState.STALLED: mesh_pb2.WORKER_STATE_STALLED,
    }
)


class OperatedModel(Protocol):
    """The parts of one model's router that operators are shown. Implementation: ModelRouter."""

    limiter: ConcurrencyLimiter
    queue: PlacementQueue
    in_flight: InFlightTable
    mesh: MeshView


class MeshServicer(mesh_pb2_grpc.MeshServicer):
    """`clock` is the registry's monotonic clock, in seconds."""

    def __init__(
        self, models: Sequence[OperatedModel], journal: Journal, callers: CallerDirectory, clock: Callable[[], float]
    ) -> None:
        self._models = models
        self._journal = journal
        self._callers = callers
        self._clock = clock

    async def ListWorkers(
        self, request: mesh_pb2.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> mesh_pb2.ListWorkersResponse:
        """List all known workers, recent incidents, and recent and running requests."""
        self._callers.tenant_of(context.invocation_metadata()).require_operator()
        models, journal = self._models, self._journal
        return mesh_pb2.ListWorkersResponse(
            workers=[worker for model in models for worker in self._workers(model)],
            queued_requests=sum(model.queue.num_queued for model in models),
            active_requests=sum(model.limiter.num_held for model in models),
            shortage=self._shortage(),
            ended_choices=journal.num_ended,
            failed_choices=journal.num_failed,
            replays=journal.num_replays,
            incidents=map(self._incident, journal.incidents),
            traces=map(self._trace, journal.traces),
            running=map(self._trace, journal.running),
        )

    def _shortage(self) -> mesh_pb2.Shortage:
        """The shortage of the first model whose requests wait."""
        shortages = (model.queue.shortage for model in self._models)
        first = next((shortage for shortage in shortages if shortage is not None), None)
        return _SHORTAGES.get(first, mesh_pb2.SHORTAGE_UNSPECIFIED)

    def _workers(self, model: OperatedModel) -> list[mesh_pb2.WorkerStatus]:
        views, serving = model.mesh.views(), model.mesh.serving()
        in_flight = model.in_flight.by_worker(views)
        return [
            self._worker(
                view,
                in_flight.get(view.info.incarnation, InFlight()),
                serving,
                model.in_flight.transfers(view.info),
                canary_error=model.mesh.canary_error(view.info),
            )
            for view in views
        ]

    def _worker(
        self,
        view: WorkerView,
        in_flight: InFlight,
        serving: frozenset[str],
        transfers: Transfers,
        *,
        canary_error: str,
    ) -> mesh_pb2.WorkerStatus:
        return mesh_pb2.WorkerStatus(
            record=_record_to_proto(view.info),
            load=_load_to_proto(view.load),
            state=_state_to_proto(view.state),
            last_seen=wire.duration_to_proto(self._age_s(view.last_seen_s)),
            serving=view.info.incarnation in serving,
            open_transfers=transfers.num_open,
            transferred_bytes=transfers.num_bytes,
            prefilling_tokens=in_flight.prefill_tokens,
            canary_error=canary_error,
        )

    def _incident(self, incident: Incident) -> mesh_pb2.Incident:
        return mesh_pb2.Incident(
            kind=f"INCIDENT_KIND_{incident.kind.name}",
            age=wire.duration_to_proto(self._age_s(incident.at_s)),
            worker_id=incident.worker_id,
            request_id=incident.request_id,
            cause=incident.cause,
        )

    def _trace(self, trace: Trace) -> mesh_pb2.RequestTrace:
        attempts = (
            mesh_pb2.AttemptPlace(prefill_worker=workers.prefill, decode_worker=workers.decode, failure=workers.failure)
            for workers in trace.attempt_workers
        )
        return mesh_pb2.RequestTrace(
            request_id=trace.request_id,
            age=wire.duration_to_proto(self._age_s(trace.at_s)),
            prompt_tokens=trace.prompt_tokens,
            completion_tokens=trace.completion_tokens,
            cached_tokens=trace.cached_tokens,
            finish_reason=wire.finish_to_proto(trace.finish_reason),
            error=trace.error,
            timing=None if trace.timing is None else timing_to_proto(trace.timing),
            places=attempts,
        )

    def _age_s(self, at_s: float) -> float:
        return max(0.0, self._clock() - at_s)


def _record_to_proto(info: WorkerInfo) -> mesh_pb2.WorkerRecord:
    """Leave out what only the mesh needs: KV layout, addresses of ranks, tokenizer and protocol version."""
    return mesh_pb2.WorkerRecord(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        role=_ROLES[info.role],
        address=info.address,
        model=info.model,
        max_batch_tokens=info.max_batch_tokens,
        max_num_seqs=info.max_num_seqs,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        device=info.device,
        pid=info.pid,
        speculative=info.speculative,
        tensor_parallel=info.tensor_parallel,
    )


def _load_to_proto(load: WorkerLoad) -> mesh_pb2.WorkerLoad:
    """Copy the load that the worker's last heartbeat reported."""
    return mesh_pb2.WorkerLoad(
        free_blocks=load.free_blocks,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        pending_tokens=load.pending_tokens,
        generated_tokens=load.generated_tokens,
        computed_tokens=load.computed_tokens,
        drafted_tokens=load.drafted_tokens,
        accepted_tokens=load.accepted_tokens,
    )


def _state_to_proto(state: WorkerState) -> mesh_pb2.WorkerState:
    """Map by name: the two enums are free to number their values apart."""
    return _STATES[state]


def timing_to_proto(timing: Timing) -> generation_pb2.Timing:
    """Convert a timing, for clients and for operators."""
    return generation_pb2.Timing(
        total_ms=_ms(timing.total_s),
        prepare_ms=_ms(timing.prepare_s),
        first_token_ms=_ms(timing.first_token_s),
        attempts=map(_attempt_to_proto, timing.attempts),
    )


def _attempt_to_proto(attempt: AttemptTiming) -> generation_pb2.AttemptTiming:
    phases = {phase.name.removesuffix("_s"): getattr(attempt.phases, phase.name) for phase in fields(attempt.phases)}
    return generation_pb2.AttemptTiming(
        kv_transfer_ms=None if attempt.kv_transfer_s is None else _ms(attempt.kv_transfer_s),
        **{f"{name}_ms": _ms(seconds) for name, seconds in phases.items()},
    )


def _ms(seconds: float) -> float:
    """Milliseconds, rounded to microseconds."""
    return round(seconds * 1000, 3)


class RouterMetrics:
    """One instance per router. A JournalReader."""

    def __init__(self) -> None:
        self.registry = new_registry()
        self.gaps = Gaps("tandem_inter_token_latency_seconds", "Gaps between tokens of a choice, replays included")
        self.registry.register(self.gaps)
        count, seconds, tokens = self._counter, self._seconds, self._tokens
        self._succeeded = count("request_success", "Choices that ended well", "finished_reason")
        self._failed = count("request_failure", "Choices that ended with an error", "error")
        self._cancelled = count("request_cancelled", "Choices whose client left")
        self._refused = count("request_refused", "Requests refused before they began", "error")
        self._incidents = count("incidents", "What happened to workers: joined, lost, tripped, ...", "kind")
        self._replays = count("replays", "Attempts that failed and were followed by another, or by the end", "cause")
        self._prompt_tokens = count("prompt_tokens", "Tokens of prompts")
        self._generation_tokens = count("generation_tokens", "Tokens generated")
        self._cache_queries = count("prefix_cache_queries", "Tokens of prompts, looked for in prefix caches")
        self._cache_hits = count("prefix_cache_hits", "Tokens of prompts found in prefix caches")
        self._prompt_length = tokens("request_prompt_tokens", "Tokens of a choice's prompt")
        self._generated_length = tokens("request_generation_tokens", "Tokens generated for a choice")
        self._latency = seconds("e2e_request_latency_seconds", "From a request's arrival to a choice's end")
        self._first_token = seconds("time_to_first_token_seconds", "From a request's arrival to a choice's first token")
        self._per_token = seconds("request_time_per_output_token_seconds", "Mean gap between a choice's tokens")
        self._kv_transfer = seconds("kv_transfer_seconds", "From the opening of a KV transfer to its commit")
        self._events = seconds("request_event_seconds", "From a request's arrival to its lifetime events", "event")
        self._phases = {
            phase: seconds(f"request_{phase}_time_seconds", f"A choice's time in the phase {phase}") for phase in PHASES
        }
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Create rare series with value 0: Prometheus does not see the increase of a series that starts at 1."""
        for kind in IncidentKind:
            if kind not in (IncidentKind.REPLAYED, IncidentKind.FAILED):
                self._incidents.labels(kind.value)
        for cause in Replayable.__subclasses__():
            self._replays.labels(cause.__name__)
        for error in (AttemptsFailed, DeadlineExceeded, NoWorkers, Overloaded):
            self._failed.labels(error.__name__)
        for refusal in (InvalidRequest, Overloaded):
            self._refused.labels(refusal.__name__)

    def watch(self, models: Sequence[OperatedModel]) -> None:
        """Add gauges over all models. Call it on the event loop that owns the models."""
        self.registry.register(OnLoop(lambda: _gauges(models)))

    def noted(self, incident: Incident) -> None:
        if incident.kind is IncidentKind.REPLAYED:
            self._replays.labels(incident.cause).inc()
        elif incident.kind is not IncidentKind.FAILED:  # counted by `ended`
            self._incidents.labels(incident.kind.value).inc()

    def refused(self, error: str) -> None:
        self._refused.labels(error).inc()

    def ended(self, trace: Trace) -> None:
        if trace.error == CANCELLED:
            self._cancelled.inc()
        elif trace.error:
            self._failed.labels(trace.error).inc()
        elif trace.finish_reason is not None:
            self._succeeded.labels(trace.finish_reason.value).inc()
        for event, at_s in trace.events_s.items():
            self._events.labels(event).observe(at_s)
        self._count_tokens(trace)
        self._latency.observe(trace.events_s["finished"])
        if trace.timing is not None:
            self._time(trace, trace.timing)

    def _count_tokens(self, trace: Trace) -> None:
        self._prompt_tokens.inc(trace.prompt_tokens)
        self._prompt_length.observe(trace.prompt_tokens)
        self._generation_tokens.inc(trace.completion_tokens)
        self._generated_length.observe(trace.completion_tokens)
        self._cache_queries.inc(trace.prompt_tokens)
        self._cache_hits.inc(trace.cached_tokens)

    def _time(self, trace: Trace, timing: Timing) -> None:
        for phase, phase_s in timing.phases_s.items():
            self._phases[phase].observe(phase_s)
        for attempt in timing.attempts:
            if attempt.kv_transfer_s is not None:
                self._kv_transfer.observe(attempt.kv_transfer_s)
        if trace.completion_tokens:
            self._first_token.observe(timing.first_token_s)
        if trace.completion_tokens > 1:
            self._per_token.observe((timing.total_s - timing.first_token_s) / (trace.completion_tokens - 1))

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"tandem_{name}", help_text, labels, registry=self.registry)

    def _seconds(self, name: str, help_text: str, *labels: str) -> Histogram:
        return Histogram(f"tandem_{name}", help_text, labels, buckets=SECONDS, registry=self.registry)

    def _tokens(self, name: str, help_text: str) -> Histogram:
        return Histogram(f"tandem_{name}", help_text, buckets=TOKENS, registry=self.registry)


def _gauges(models: Sequence[OperatedModel]) -> Iterator[Metric]:
    num_held = sum(model.limiter.num_held for model in models)
    num_waiting = sum(model.queue.num_queued_choices for model in models)
    yield _gauge("num_requests_running", "Choices that workers are at", max(0, num_held - num_waiting))
    yield _gauge("num_requests_waiting", "Choices in the queue for workers", num_waiting)
    yield _gauge("max_requests", "The cap on choices in service", sum(model.limiter.max_permits for model in models))
    num_transferring = sum(model.in_flight.num_transferring for model in models)
    yield _gauge("kv_transfers_open", "KV transfers under way", num_transferring)
    views = [view for model in models for view in model.mesh.views()]
    serving = frozenset[str]().union(*(model.mesh.serving() for model in models))
    states = CountOf((view.info.role, view.state) for view in views)
    workers = GaugeMetricFamily("tandem_workers", "Workers this router knows", labels=["role", "state"])
    proven = GaugeMetricFamily("tandem_workers_serving", "Workers that get requests", labels=["role"])
    for role in WorkerRole:
        for state in WorkerState:
            workers.add_metric([role.value, state.value], states[role, state])
        proven.add_metric([role.value], sum(v.info.role is role and v.info.incarnation in serving for v in views))
    yield workers
    yield proven


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tandem_{name}", help_text, value)
