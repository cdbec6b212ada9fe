"""The Worker gRPC service, which both kinds of worker serve beside their own. It only translates; RoleServer has the
logic.
"""

from collections.abc import Awaitable, Callable

import grpc

from mesh import wire
from mesh.domain.worker import WorkerInfo, WorkerRole
from mesh.v1 import worker_pb2, worker_pb2_grpc
from worker.registration import ReportSource


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Identity and load, for routers that get no heartbeats of this worker; draining, and the change of its role."""

    def __init__(
        self,
        info: WorkerInfo,
        source: ReportSource,
        set_draining: Callable[[bool], Awaitable[None]],
        switch_role: Callable[[WorkerRole], Awaitable[None]],
    ) -> None:
        self._info = info
        self._source = source
        self._set_draining = set_draining
        self._switch_role = switch_role

    async def GetWorker(
        self, request: worker_pb2.GetWorkerRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetWorkerResponse:
        load = await self._source.load()
        return worker_pb2.GetWorkerResponse(record=wire.worker_to_proto(self._info), load=wire.load_to_proto(load))

    async def SetDraining(
        self, request: worker_pb2.SetDrainingRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SetDrainingResponse:
        await self._set_draining(request.draining)
        return worker_pb2.SetDrainingResponse()

    async def SwitchRole(
        self, request: worker_pb2.SwitchRoleRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SwitchRoleResponse:
        await self._switch_role(wire.role_from_proto(request.role))
        return worker_pb2.SwitchRoleResponse()
