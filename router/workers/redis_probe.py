"""Direct health checks of silent workers, for when Redis or the network to it is down."""

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh import wire
from mesh.domain.worker import WorkerLoad, WorkerState
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import Credentials
from mesh.v1 import worker_pb2, worker_pb2_grpc
from router.workers.membership import Membership, WorkerView

_HEALTH_TIMEOUT_S = 1.0
# A worker in a long step answers its health check, but not this call.
_LOAD_TIMEOUT_S = 0.5
_MAX_CONCURRENT = 32


class DirectChecks:
    """Calls workers at the addresses that they have registered."""

    def __init__(self, membership: Membership, credentials: Credentials) -> None:
        self._membership = membership
        self._credentials = credentials
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def check(self, views: Iterable[WorkerView]) -> None:
        """Count an answer as a heartbeat. Without an answer nothing changes: `expire` handles silent workers."""
        await asyncio.gather(*(self._check(view) for view in views))

    async def _check(self, view: WorkerView) -> None:
        async with self._slots:
            try:
                async with open_channel(view.info.address, self._credentials.tls, own_connection=True) as channel:
                    serving = await _is_serving(channel)
                    load = await self._load(channel, view)
            except grpc.aio.AioRpcError:
                return
            except asyncio.CancelledError:
                # grpc.aio also raises this if the worker ends the call; re-raise only if our own task is cancelled.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                return
        if load is None:
            self._membership.lose(view.info.worker_id, view.info.incarnation)
            return
        now = self._membership.find(view.info.worker_id)
        if now is None or now.last_seen_s != view.last_seen_s:
            return  # a heartbeat has arrived in the meantime
        # A draining worker never serves again. The last heartbeat tells why a worker does not serve.
        state_if_not_serving = (
            now.state if now.state in (WorkerState.STALLED, WorkerState.DRAINING) else WorkerState.DRAINING
        )
        state = WorkerState.READY if serving else state_if_not_serving
        self._membership.heartbeat(view.info.worker_id, view.info.incarnation, load, state)

    async def _load(self, channel: grpc.aio.Channel, view: WorkerView) -> WorkerLoad | None:
        """Return the load; None if another run of a worker has taken over the address."""
        try:
            answer = await worker_pb2_grpc.WorkerStub(channel).GetWorker(
                worker_pb2.GetWorkerRequest(), timeout=_LOAD_TIMEOUT_S, metadata=self._credentials.metadata()
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return view.load
            raise
        is_same = answer.record.incarnation == view.info.incarnation
        return wire.load_from_proto(answer.load) if is_same else None


async def _is_serving(channel: grpc.aio.Channel) -> bool:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
