"""The Worker gRPC service, for operators: identity, load and drain."""

from collections.abc import Awaitable, Callable

import grpc

from mesh import wire
from mesh.domain.worker import WorkerInfo
from mesh.v1 import worker_pb2, worker_pb2_grpc
from worker.agent import ReportSource


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Translates only; `drain` is WorkerRuntime.drain."""

    def __init__(self, info: WorkerInfo, source: ReportSource, drain: Callable[[], Awaitable[None]]) -> None:
        self._info = info
        self._source = source
        self._drain = drain

    async def GetWorker(
        self, request: worker_pb2.GetWorkerRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetWorkerResponse:
        load = await self._source.load()
        return worker_pb2.GetWorkerResponse(record=wire.worker_to_proto(self._info), load=wire.load_to_proto(load))

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DrainResponse:
        """Accept no new work from now on; running work continues."""
        await self._drain()
        return worker_pb2.DrainResponse()
