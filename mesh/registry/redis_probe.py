"""Direct health checks: how a router knows that a silent worker lives while Redis, or the way to it, is cut."""

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh import wire
from mesh.domain.worker import WorkerLoad, WorkerState
from mesh.registry.membership import Membership, WorkerView
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import Credentials
from tandem.v1 import worker_pb2, worker_pb2_grpc

_CHECK_S = 1.0
# A worker in the middle of a long step answers its health check, but not this.
_ASK_S = 0.5
_MAX_AT_A_TIME = 32


class DirectChecks:
    """Asks workers at the addresses they have registered with."""

    def __init__(self, membership: Membership, credentials: Credentials) -> None:
        self._membership = membership
        self._credentials = credentials
        self._slots = asyncio.Semaphore(_MAX_AT_A_TIME)

    async def check(self, views: Iterable[WorkerView]) -> None:
        """Count an answer as a sign of life. No answer changes nothing: silence has its own consequences."""
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
                # grpc.aio also raises this when the worker ends the call; only our own task's cancellation is ours.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                return
        if load is None:
            self._membership.lose(view.info.worker_id, view.info.incarnation)
            return
        now = self._membership.find(view.info.worker_id)
        if now is None or now.last_seen_s != view.last_seen_s:
            return  # it has been heard of in the meantime
        # Drained workers never serve again; of those that do not serve, the last beat has said why.
        told = now.state if now.state in (WorkerState.STALLED, WorkerState.DRAINING) else WorkerState.DRAINING
        state = WorkerState.READY if serving else told
        self._membership.heartbeat(view.info.worker_id, view.info.incarnation, load, state)

    async def _load(self, channel: grpc.aio.Channel, view: WorkerView) -> WorkerLoad | None:
        """Its load; None if another run of a worker has taken the address over."""
        try:
            answer = await worker_pb2_grpc.WorkerStub(channel).GetWorker(
                worker_pb2.GetWorkerRequest(), timeout=_ASK_S, metadata=self._credentials.metadata()
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return view.load
            raise
        is_same = answer.record.incarnation == view.info.incarnation
        return wire.load_from_proto(answer.load) if is_same else None


async def _is_serving(channel: grpc.aio.Channel) -> bool:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_CHECK_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
