"""The Worker service: who a worker is, and its drain."""

import grpc

from mesh import wire
from mesh.domain.worker import WorkerInfo, WorkerState
from mesh.worker.agent import RegistryAgent, ReportSource
from tandem.v1 import worker_pb2, worker_pb2_grpc


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Answers operators of one worker."""

    def __init__(self, info: WorkerInfo, source: ReportSource, agent: RegistryAgent) -> None:
        self._info = info
        self._source = source
        self._agent = agent

    async def GetWorker(
        self, request: worker_pb2.GetWorkerRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetWorkerResponse:
        """Identity and load."""
        load = await self._source.load()
        return worker_pb2.GetWorkerResponse(record=wire.worker_to_proto(self._info), load=wire.load_to_proto(load))

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DrainResponse:
        """Take nothing new from now on; routers hear of it with the next beat, which is sent at once."""
        self._agent.state = WorkerState.DRAINING
        self._agent.beat_now()
        return worker_pb2.DrainResponse()
