"""The Worker service: who a worker is, and its drain."""

from collections.abc import Awaitable, Callable

import grpc

from mesh import wire
from mesh.domain.worker import WorkerInfo
from mesh.worker.agent import ReportSource
from tandem.v1 import worker_pb2, worker_pb2_grpc


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Answers operators of one worker."""

    def __init__(self, info: WorkerInfo, source: ReportSource, drain: Callable[[], Awaitable[None]]) -> None:
        self._info = info
        self._source = source
        self._drain = drain

    async def GetWorker(
        self, request: worker_pb2.GetWorkerRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetWorkerResponse:
        """Identity and load."""
        load = await self._source.load()
        return worker_pb2.GetWorkerResponse(record=wire.worker_to_proto(self._info), load=wire.load_to_proto(load))

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DrainResponse:
        """Take nothing new from now on; what runs goes on."""
        await self._drain()
        return worker_pb2.DrainResponse()
