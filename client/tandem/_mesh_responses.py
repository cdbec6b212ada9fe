"""Converts the mesh messages of a router to the values of mesh.py."""

from tandem._responses import FINISH_REASONS, timing
from tandem.mesh import AttemptPlace, Incident, Mesh, RequestTrace, Worker, WorkerLoad
from tandem.v1 import mesh_pb2

_ROLES = {mesh_pb2.WORKER_ROLE_PREFILL: "prefill", mesh_pb2.WORKER_ROLE_DECODE: "decode"}
_STATES = {
    mesh_pb2.WORKER_STATE_READY: "ready",
    mesh_pb2.WORKER_STATE_DRAINING: "draining",
    mesh_pb2.WORKER_STATE_LOST: "lost",
    mesh_pb2.WORKER_STATE_STALLED: "stalled",
}
_SHORTAGES = {
    mesh_pb2.SHORTAGE_UNSPECIFIED: "",
    mesh_pb2.SHORTAGE_DECODE_WORKER: "decode worker",
    mesh_pb2.SHORTAGE_DECODE_ROOM: "decode room",
    mesh_pb2.SHORTAGE_PREFILL_ROOM: "prefill room",
}
_KINDS = {
    number: name.removeprefix("INCIDENT_KIND_").lower() for name, number in mesh_pb2.IncidentKind.items() if number
}


def mesh(message: mesh_pb2.ListWorkersResponse) -> Mesh:
    """Convert a ListWorkers response."""
    return Mesh(
        workers=tuple(map(_worker, message.workers)),
        queued_requests=message.queued_requests,
        active_requests=message.active_requests,
        shortage=_SHORTAGES.get(message.shortage, "unknown"),
        ended_choices=message.ended_choices,
        failed_choices=message.failed_choices,
        replays=message.replays,
        incidents=tuple(map(_incident, message.incidents)),
        traces=tuple(map(_trace, message.traces)),
        running=tuple(map(_trace, message.running)),
    )


def _worker(message: mesh_pb2.WorkerStatus) -> Worker:
    record, load = message.record, message.load
    return Worker(
        worker_id=record.worker_id,
        incarnation=record.incarnation,
        role=_ROLES.get(record.role, "unknown"),
        state=_STATES.get(message.state, "unknown"),
        address=record.address,
        model=record.model,
        device=record.device,
        pid=record.pid,
        num_blocks=record.num_blocks,
        max_num_seqs=record.max_num_seqs,
        load=WorkerLoad(
            free_blocks=load.free_blocks,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            pending_tokens=load.pending_tokens,
            generated_tokens=load.generated_tokens,
            computed_tokens=load.computed_tokens,
            drafted_tokens=load.drafted_tokens,
            accepted_tokens=load.accepted_tokens,
        ),
        last_seen_s=message.last_seen.ToNanoseconds() / 1e9,
        serving=message.serving,
        open_transfers=message.open_transfers,
        transferred_bytes=message.transferred_bytes,
        prefilling_tokens=message.prefilling_tokens,
        canary_error=message.canary_error,
        speculative=record.speculative or "none",
    )


def _incident(message: mesh_pb2.Incident) -> Incident:
    return Incident(
        kind=_KINDS.get(message.kind, "unknown"),
        age_s=message.age.ToNanoseconds() / 1e9,
        worker_id=message.worker_id,
        request_id=message.request_id,
        cause=message.cause,
    )


def _trace(message: mesh_pb2.RequestTrace) -> RequestTrace:
    return RequestTrace(
        request_id=message.request_id,
        age_s=message.age.ToNanoseconds() / 1e9,
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        finish_reason=FINISH_REASONS.get(message.finish_reason),
        error=message.error,
        timing=timing(message.timing) if message.HasField("timing") else None,
        places=tuple(AttemptPlace(p.prefill_worker, p.decode_worker, p.failure) for p in message.places),
    )
