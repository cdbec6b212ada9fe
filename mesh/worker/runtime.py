"""A worker's process after its engine is built: listen, register, serve, drain, stop."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import NoReturn

import structlog

from mesh.domain.errors import ConfigurationError, MeshError
from mesh.domain.worker import WorkerInfo, WorkerState
from mesh.process import announce, until_stopped
from mesh.rpc.server import Listen, Server
from mesh.worker.agent import RegistryAgent, ReportSource
from mesh.worker.servicer import WorkerServicer
from mesh.worker.settings import WorkerSettings
from tandem.v1 import worker_pb2_grpc

log = structlog.get_logger(__name__)

_STOP_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class RoleParts:
    """What a role brings: the names of its services, how to wait for its work to end, and news of its engine's
    death.
    """

    services: tuple[str, ...]
    drained: Callable[[], Awaitable[None]]
    engine_died: asyncio.Event


class WorkerRuntime:
    """One worker's stay in the mesh. Its server's port is bound at once; `info` gets the address."""

    def __init__(self, settings: WorkerSettings, info: WorkerInfo, source: ReportSource) -> None:
        self._settings = settings
        self.server = Server(Listen(settings.host, settings.port, settings.key))
        host = settings.advertise_host or settings.host
        self.info = replace(info, address=f"{host}:{self.server.port}")
        self._agent = RegistryAgent(self.info, source, settings.key)
        servicer = WorkerServicer(self.info, source, self._agent)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, self.server.grpc)
        announce("listening", address=self.info.address)

    def is_draining(self) -> bool:
        """True once the worker takes nothing new; services ask before they accept work."""
        return self._agent.state is WorkerState.DRAINING

    async def serve(self, role: RoleParts) -> None:
        """Serve until told to stop. Raises ConfigurationError if the mesh refuses this worker, MeshError if its engine
        dies."""
        await self.server.start((*role.services, "tandem.v1.Worker"))
        await self.server.set_serving(True)
        announce("ready")
        stopped = asyncio.create_task(until_stopped(self._settings))
        registered = asyncio.create_task(self._agent.run(self._settings.registry_address))
        died = asyncio.create_task(role.engine_died.wait())
        try:
            await asyncio.wait([stopped, registered, died], return_when=asyncio.FIRST_COMPLETED)
            if registered.done():
                _raise_refusal(registered)
            if died.done():
                raise MeshError("the engine died; the log has the details")
            await self._drain(role)
        finally:
            for task in (stopped, registered, died):
                task.cancel()
            await self.server.stop(_STOP_GRACE_S)

    async def _drain(self, role: RoleParts) -> None:
        """NOT_SERVING first, then nothing new, then wait for what runs."""
        await self.server.set_serving(False)
        self._agent.state = WorkerState.DRAINING
        self._agent.beat_now()
        try:
            await asyncio.wait_for(role.drained(), self._settings.drain_grace_s)
        except TimeoutError:
            log.warning("stopping with work left", grace_s=self._settings.drain_grace_s)


def _raise_refusal(registered: asyncio.Task[None]) -> NoReturn:
    error = registered.exception()
    if isinstance(error, MeshError):
        raise ConfigurationError(f"the router refuses this worker: {error}") from None
    raise error or MeshError("registration ended")
