"""What operators ask: the mesh as this router sees it. Translation only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import grpc

from mesh import wire
from mesh.registry.membership import WorkerView
from router.journal import Incident, Journal, Trace
from router.ledger import Transfers
from router.model_router import ModelRouter
from router.placement import InFlight, NoPlacement
from router.servicer import Callers, timing_to_proto
from tandem.v1 import worker_pb2, worker_pb2_grpc

_SHORTAGES: Mapping[NoPlacement | None, worker_pb2.Shortage] = MappingProxyType(
    {
        NoPlacement.NO_DECODE_WORKER: worker_pb2.SHORTAGE_DECODE_WORKER,
        NoPlacement.NO_DECODE_ROOM: worker_pb2.SHORTAGE_DECODE_ROOM,
        NoPlacement.NO_PREFILL_ROOM: worker_pb2.SHORTAGE_PREFILL_ROOM,
    }
)


@dataclass(frozen=True, slots=True)
class MeshSources:
    """What operators are told about. `clock` gives the registry's monotonic seconds."""

    models: Sequence[ModelRouter]
    journal: Journal
    clock: Callable[[], float]


class MeshServicer(worker_pb2_grpc.MeshServicer):
    """What operators call."""

    def __init__(self, sources: MeshSources, callers: Callers) -> None:
        self._sources = sources
        self._callers = callers

    async def ListWorkers(
        self, request: worker_pb2.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ListWorkersResponse:
        """All known workers, and what happened lately."""
        self._callers.tenant_of(context.invocation_metadata()).require_operator()
        sources, journal = self._sources, self._sources.journal
        return worker_pb2.ListWorkersResponse(
            workers=[worker for model in sources.models for worker in self._workers(model)],
            queued_requests=sum(model.queue.num_queued for model in sources.models),
            active_requests=sum(model.permits.num_held for model in sources.models),
            shortage=self._shortage(),
            ended_choices=journal.num_ended,
            failed_choices=journal.num_failed,
            replays=journal.num_replays,
            incidents=map(self._incident, journal.incidents),
            traces=map(self._trace, journal.traces),
            running=map(self._trace, journal.running),
        )

    def _shortage(self) -> worker_pb2.Shortage:
        """Of the first model whose requests wait."""
        waits = (model.queue.waits_for for model in self._sources.models)
        first = next((shortage for shortage in waits if shortage is not None), None)
        return _SHORTAGES.get(first, worker_pb2.SHORTAGE_UNSPECIFIED)

    def _workers(self, model: ModelRouter) -> list[worker_pb2.WorkerStatus]:
        views, serving = model.mesh.views(), model.mesh.serving()
        in_flight = model.ledger.in_flight(views)
        return [
            self._worker(
                view, in_flight.get(view.info.incarnation, InFlight()), serving, model.ledger.transfers(view.info)
            )
            for view in views
        ]

    def _worker(
        self, view: WorkerView, in_flight: InFlight, serving: frozenset[str], transfers: Transfers
    ) -> worker_pb2.WorkerStatus:
        return worker_pb2.WorkerStatus(
            record=wire.worker_to_proto(view.info),
            load=wire.load_to_proto(view.load),
            state=wire.state_to_proto(view.state),
            last_seen=wire.duration_to_proto(self._age_s(view.last_seen_s)),
            serving=view.info.incarnation in serving,
            open_transfers=transfers.num_open,
            transferred_bytes=transfers.num_bytes,
            prefilling_tokens=in_flight.prefill_tokens,
        )

    def _incident(self, incident: Incident) -> worker_pb2.Incident:
        return worker_pb2.Incident(
            kind=f"INCIDENT_KIND_{incident.kind.name}",
            age=wire.duration_to_proto(self._age_s(incident.at_s)),
            worker_id=incident.worker_id,
            request_id=incident.request_id,
            cause=incident.cause,
        )

    def _trace(self, trace: Trace) -> worker_pb2.RequestTrace:
        places = (
            worker_pb2.AttemptPlace(prefill_worker=s.prefill, decode_worker=s.decode, failure=s.failure)
            for s in trace.stops
        )
        return worker_pb2.RequestTrace(
            request_id=trace.request_id,
            age=wire.duration_to_proto(self._age_s(trace.at_s)),
            prompt_tokens=trace.prompt_tokens,
            completion_tokens=trace.completion_tokens,
            cached_tokens=trace.cached_tokens,
            finish_reason=wire.finish_to_proto(trace.finish_reason),
            error=trace.error,
            timing=None if trace.timing is None else timing_to_proto(trace.timing),
            places=places,
        )

    def _age_s(self, at_s: float) -> float:
        return max(0.0, self._sources.clock() - at_s)
