"""The registry over gRPC, hosted by the router: one stream per worker; the worker is lost when the stream ends."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import structlog

from mesh import wire
from mesh.domain.errors import InvalidRequest
from mesh.domain.worker import HEARTBEAT_INTERVAL_S, CacheEvent, WorkerInfo
from mesh.v1 import worker_pb2, worker_pb2_grpc
from router.workers.membership import Membership

log = structlog.get_logger(__name__)

SILENT_S = 5.0
FORGET_S = 300.0


class RegistryServicer(worker_pb2_grpc.RegistryServicer):
    """Feeds a Membership from the streams of workers."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._streams: dict[str, object] = {}  # the latest stream of each worker, by worker id

    async def Register(
        self, request_iterator: AsyncIterator[worker_pb2.RegisterRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.RegisterResponse]:
        """Follow one worker until its stream ends."""
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("message") != "record":
            raise InvalidRequest("the first message must be the worker's record")
        info = wire.worker_from_proto(first.record)
        self._membership.join(info)
        stream = self._streams[info.worker_id] = object()
        log.info("worker joined", worker=info.worker_id, role=info.role.value, address=info.address, pid=info.pid)
        try:
            interval = wire.duration_to_proto(HEARTBEAT_INTERVAL_S)
            yield worker_pb2.RegisterResponse(registered=worker_pb2.Registered(heartbeat_interval=interval))
            async for request in request_iterator:
                if not self._follow(info, request):
                    yield worker_pb2.RegisterResponse(snapshot_request=worker_pb2.SnapshotRequest())
        finally:
            # After a network failure the worker may have a new stream before the old one ends here.
            if self._streams.get(info.worker_id) is stream:
                del self._streams[info.worker_id]
                self._membership.lose(info.worker_id, info.incarnation)
                log.warning("worker left", worker=info.worker_id, role=info.role.value)

    def _follow(self, info: WorkerInfo, request: worker_pb2.RegisterRequest) -> bool:
        """Apply one message. False if a snapshot of the prefix cache is needed."""
        if request.HasField("snapshot"):
            self._membership.replace_cache(
                info.worker_id, info.incarnation, request.snapshot.next_number, request.snapshot.block_hashes
            )
            return True
        beat = request.heartbeat
        self._membership.heartbeat(
            info.worker_id, info.incarnation, wire.load_from_proto(beat.load), wire.state_from_proto(beat.state)
        )
        return self._membership.apply_cache_events(
            info.worker_id,
            info.incarnation,
            beat.cache_events.first_number,
            [CacheEvent(event.block_hash, event.evicted) for event in beat.cache_events.events],
        )


async def expire_forever(membership: Membership) -> None:
    """Mark silent workers LOST, until cancelled. Run it as a task."""
    while True:
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        membership.expire(silent_s=SILENT_S, forget_s=FORGET_S)
