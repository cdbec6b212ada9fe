"""The operators' view of a router: the public Mesh service. Translation only.

The messages of Mesh are not those of mesh.v1, so that the mesh can change without its clients: workers have identity,
capacity and load, and nothing of the mesh's own protocol.
"""

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration

from mesh import wire
from mesh.domain.errors import InvalidRequest
from mesh.domain.worker import WorkerInfo, WorkerRole, WorkerState
from mesh.durations import duration_from_proto, duration_to_proto
from router.admission.in_flight import Transfers
from router.admission.placement import NoPlacement
from router.admission.roster import InFlight
from router.advice import Advice
from router.api.generation_servicer import timing_to_proto
from router.history import History, Point
from router.journal import Incident, Journal, Trace
from router.model_router import ModelRouter
from router.tenants import CallerDirectory, Tenant
from router.timeline import AttemptWorkers
from router.traffic import RoutedRequests, Traffic
from router.workers.connections import WorkerControl
from tandem.v1 import mesh_pb2, mesh_pb2_grpc

log = structlog.get_logger(__name__)

_SHORTAGES: Mapping[NoPlacement | None, mesh_pb2.Shortage] = MappingProxyType(
    {
        NoPlacement.NO_DECODE_WORKER: mesh_pb2.SHORTAGE_DECODE_WORKER,
        NoPlacement.NO_DECODE_CAPACITY: mesh_pb2.SHORTAGE_DECODE_CAPACITY,
        NoPlacement.NO_PREFILL_CAPACITY: mesh_pb2.SHORTAGE_PREFILL_CAPACITY,
    }
)

# Mapped by name: the two enums are free to number their values apart.
_ROLES: Mapping[WorkerRole, mesh_pb2.WorkerRole] = MappingProxyType(
    {role: getattr(mesh_pb2, f"WORKER_ROLE_{role.name}") for role in WorkerRole}
)
_STATES: Mapping[WorkerState, mesh_pb2.WorkerState] = MappingProxyType(
    {state: getattr(mesh_pb2, f"WORKER_STATE_{state.name}") for state in WorkerState}
)


class MeshServicer(mesh_pb2_grpc.MeshServicer):
    """Serves the calls of operators. `tell_traffic` tells other routers of a change of the traffic. `clock` returns
    monotonic seconds, as that of Membership.
    """

    def __init__(
        self,
        models: Sequence[ModelRouter],
        callers: CallerDirectory,
        *,
        journal: Journal,
        history: History,
        control: WorkerControl,
        traffic: Traffic,
        tell_traffic: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self._models = models
        self._journal = journal
        self._history = history
        self._control = control
        self._traffic = traffic
        self._tell_traffic = tell_traffic
        self._callers = callers
        self._clock = clock

    async def ListWorkers(
        self, request: mesh_pb2.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> mesh_pb2.ListWorkersResponse:
        """List all known workers, recent incidents, and recent and running requests."""
        self._operator(context)
        models, journal = self._models, self._journal
        traffic = {name: shares for name, shares in self._traffic.table.shares.items() if shares}
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
            advice=[_advice(advice, model.model.name) for model in models for advice in model.adviser.advice],
            traffic=(mesh_pb2.Traffic(name=name, shares=shares) for name, shares in traffic.items()),
            routed=(_routed(name, self._traffic.routed(name)) for name in traffic),
        )

    async def GetHistory(
        self, request: mesh_pb2.GetHistoryRequest, context: grpc.aio.ServicerContext
    ) -> mesh_pb2.GetHistoryResponse:
        """Return what this router has done over time."""
        self._operator(context)
        span_s = duration_from_proto(request.span) if request.HasField("span") else math.inf
        return mesh_pb2.GetHistoryResponse(points=map(self._point, self._history.points(span_s)))

    async def SetDraining(
        self, request: mesh_pb2.SetDrainingRequest, context: grpc.aio.ServicerContext
    ) -> mesh_pb2.SetDrainingResponse:
        """Take a worker out of service, or back into it."""
        tenant = self._operator(context)
        await self._control.set_draining(request.worker_id, draining=request.draining)
        log.warning(
            "an operator changes a worker", operator=tenant.name, worker=request.worker_id, draining=request.draining
        )
        return mesh_pb2.SetDrainingResponse()

    async def SwitchRole(
        self, request: mesh_pb2.SwitchRoleRequest, context: grpc.aio.ServicerContext
    ) -> mesh_pb2.SwitchRoleResponse:
        """Give a worker another role."""
        tenant = self._operator(context)
        role = _role_from_proto(request.role)
        await self._control.switch_role(request.worker_id, role)
        log.warning("an operator changes a role", operator=tenant.name, worker=request.worker_id, next_role=role.value)
        return mesh_pb2.SwitchRoleResponse()

    async def SetTraffic(
        self, request: mesh_pb2.SetTrafficRequest, context: grpc.aio.ServicerContext
    ) -> mesh_pb2.SetTrafficResponse:
        """Share out the requests for a name among revisions."""
        tenant = self._operator(context)
        name, shares = request.traffic.name, dict(request.traffic.shares)
        self._require_no_adapter(name, shares)
        self._traffic.share_out(name, shares)
        log.warning("an operator changes the traffic", operator=tenant.name, model=name, shares=shares)
        await self._tell_traffic()
        return mesh_pb2.SetTrafficResponse()

    def _operator(self, context: grpc.aio.ServicerContext) -> Tenant:
        """Return the caller. Raises PermissionDenied if it is no operator."""
        tenant = self._callers.tenant_of(context.invocation_metadata())
        tenant.require_operator()
        return tenant

    def _require_no_adapter(self, name: str, shares: Mapping[str, float]) -> None:
        """Raise InvalidRequest if requests that ask for an adapter by `name` would get models without it."""
        for model in self._models:
            if name in model.mesh.adapters() and any(shares.values()):
                raise InvalidRequest(f"{name!r} cannot stand for revisions: it is an adapter of {model.model.name}")

    def _point(self, point: Point) -> mesh_pb2.HistoryPoint:
        return mesh_pb2.HistoryPoint(
            age=duration_to_proto(self._age_s(point.at_s)),
            length=duration_to_proto(point.seconds),
            generated_tokens=point.generated_tokens,
            computed_tokens=point.computed_tokens,
            replays=point.replays,
            failed_choices=point.failed,
            waiting=point.waiting,
            running=point.running,
            kv_used=point.kv_used,
            first_token_p50=_optional_duration(point.first_token_s(0.5)),
            first_token_p95=_optional_duration(point.first_token_s(0.95)),
            gap_p50=_optional_duration(point.gap_s(0.5)),
            gap_p99=_optional_duration(point.gap_s(0.99)),
        )

    def _shortage(self) -> mesh_pb2.Shortage:
        """The shortage of the first model whose requests wait."""
        shortages = (model.queue.shortage for model in self._models)
        first = next((shortage for shortage in shortages if shortage is not None), None)
        return _SHORTAGES.get(first, mesh_pb2.SHORTAGE_UNSPECIFIED)

    def _workers(self, model: ModelRouter) -> Iterator[mesh_pb2.WorkerStatus]:
        serving, in_flight = model.mesh.serving(), model.in_flight.by_worker()
        all_transfers = model.in_flight.transfers()
        for view in model.mesh.views():
            incarnation = view.info.incarnation
            transfers = all_transfers.get(incarnation, Transfers(0, 0))
            yield mesh_pb2.WorkerStatus(
                record=_record_to_proto(view.info),
                load=mesh_pb2.WorkerLoad(**asdict(view.load)),
                state=_STATES[view.state],
                last_seen=duration_to_proto(self._age_s(view.last_seen_s)),
                serving=incarnation in serving,
                open_transfers=transfers.num_open,
                transferred_bytes=transfers.num_bytes,
                prefilling_tokens=in_flight.get(incarnation, InFlight()).prefill_tokens,
                canary_error=model.health.canary_error(view.info),
            )

    def _incident(self, incident: Incident) -> mesh_pb2.Incident:
        return mesh_pb2.Incident(
            kind=f"INCIDENT_KIND_{incident.kind.name}",
            age=duration_to_proto(self._age_s(incident.at_s)),
            worker_id=incident.worker_id,
            request_id=incident.request_id,
            cause=incident.cause,
        )

    def _trace(self, trace: Trace) -> mesh_pb2.RequestTrace:
        attempts = trace.timing.attempts if trace.timing is not None else ()
        return mesh_pb2.RequestTrace(
            request_id=trace.request_id,
            age=duration_to_proto(self._age_s(trace.at_s)),
            prompt_tokens=trace.prompt_tokens,
            completion_tokens=trace.completion_tokens,
            cached_tokens=trace.cached_tokens,
            finish_reason=wire.finish_to_proto(trace.finish_reason),
            error=trace.error,
            timing=None if trace.timing is None else timing_to_proto(trace.timing),
            places=(_place(attempt.workers) for attempt in attempts),
        )

    def _age_s(self, at_s: float) -> float:
        return max(0.0, self._clock() - at_s)


def _place(workers: AttemptWorkers) -> mesh_pb2.AttemptPlace:
    return mesh_pb2.AttemptPlace(prefill_worker=workers.prefill, decode_worker=workers.decode, failure=workers.failure)


def _advice(advice: Advice, model: str) -> mesh_pb2.Advice:
    action = f"ADVICE_ACTION_{advice.action.name}"
    return mesh_pb2.Advice(action=action, role=_ROLES[advice.role], reason=advice.reason, model=model)


def _routed(name: str, routed: RoutedRequests) -> mesh_pb2.RoutedTraffic:
    span = duration_to_proto(routed.span_s)
    return mesh_pb2.RoutedTraffic(name=name, requests=routed.counts, span=span)


def _role_from_proto(number: mesh_pb2.WorkerRole) -> WorkerRole:
    """Raises InvalidRequest for an unknown role."""
    role = next((role for role, known in _ROLES.items() if known == number), None)
    if role is None:
        raise InvalidRequest(f"role must be prefill or decode, got {number}")
    return role


def _optional_duration(seconds: float | None) -> Duration | None:
    return None if seconds is None else duration_to_proto(seconds)


def _record_to_proto(info: WorkerInfo) -> mesh_pb2.WorkerRecord:
    """Leave out what only the mesh needs: the rest of the layout, addresses of ranks, tokenizer, protocol version."""
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
        pipeline_parallel=info.pipeline_parallel,
        adapters=[adapter.name for adapter in info.adapters],
        switchable=info.switchable,
        block_size=info.layout.block_size,
        state_blocks=info.layout.state_blocks,
        windows=info.layout.windows,
        windows_are_chunks=info.layout.windows_are_chunks,
    )
