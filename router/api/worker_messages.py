"""Workers as the public Mesh service shows them: identity, capacity and load, without the mesh's own protocol.

The public messages are not those of mesh.v1, so that the mesh can change without its clients.
"""

from collections.abc import Mapping
from types import MappingProxyType

from mesh.domain.worker import WorkerInfo, WorkerLoad, WorkerRole, WorkerState
from tandem.v1 import mesh_pb2

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


def record_to_proto(info: WorkerInfo) -> mesh_pb2.WorkerRecord:
    """Leave out what only the mesh needs: KV layout, ranks, tokenizer and protocol version."""
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
    )


def load_to_proto(load: WorkerLoad) -> mesh_pb2.WorkerLoad:
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


def state_to_proto(state: WorkerState) -> mesh_pb2.WorkerState:
    """Map by name: the two enums are free to number their values apart."""
    return _STATES[state]
