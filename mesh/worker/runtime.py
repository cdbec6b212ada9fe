"""A worker's process after its engine is built: listen, register, serve, drain, stop."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import structlog

from mesh.domain.errors import ConfigurationError, MeshError
from mesh.domain.worker import WorkerInfo, WorkerState
from mesh.process import announce, until_stopped
from mesh.rpc.credentials import MeshKey
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
        self.credentials = settings.load_credentials()
        listen = Listen(settings.host, settings.port, self.credentials.key, tls=self.credentials.tls)
        self.server = Server(listen)
        host = settings.advertise_host or settings.host
        self.info = replace(info, address=f"{host}:{self.server.port}")
        self._agent = RegistryAgent(self.info, source, self.credentials)
        self._stay_registered = _registration(settings, self.credentials.key, self._agent)
        servicer = WorkerServicer(self.info, source, self.drain)
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
        registered = asyncio.create_task(self._stay_registered())
        died = asyncio.create_task(role.engine_died.wait())
        try:
            await asyncio.wait([stopped, registered, died], return_when=asyncio.FIRST_COMPLETED)
            if registered.done():
                _raise_refusal(registered)
            await self._drain(role, died)
            if died.done():
                raise MeshError("the engine died; the log has the details")
        finally:
            for task in (stopped, registered, died):
                task.cancel()
            await self.server.stop(_STOP_GRACE_S)

    async def drain(self) -> None:
        """NOT_SERVING first, then nothing new; routers hear of it with the next beat, which is sent at once."""
        await self.server.set_serving(False)
        self._agent.state = WorkerState.DRAINING
        self._agent.beat_now()

    async def _drain(self, role: RoleParts, died: asyncio.Task[Literal[True]]) -> None:
        """Drain, and wait for what runs; a dead engine ends the wait."""
        await self.drain()
        drained = asyncio.ensure_future(role.drained())
        either: list[asyncio.Future[Any]] = [drained, died]
        await asyncio.wait(either, timeout=self._settings.drain_grace_s, return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            log.warning("stopping with work left", grace_s=self._settings.drain_grace_s)
            drained.cancel()


def _registration(
    settings: WorkerSettings, key: MeshKey | None, agent: RegistryAgent
) -> Callable[[], Coroutine[Any, Any, None]]:
    """How this worker stays registered. Raises ConfigurationError."""
    if not settings.registry_url:
        return lambda: agent.run(settings.registry_address)
    try:
        from mesh.registry.redis_agent import RedisAgent
    except ImportError as error:
        raise ConfigurationError("registry_url needs redis: install tandem-serve[redis]") from error
    return RedisAgent(settings.registry_url, key, agent).run


def _raise_refusal(registered: asyncio.Task[None]) -> NoReturn:
    error = registered.exception()
    if isinstance(error, MeshError):
        raise ConfigurationError(f"the router refuses this worker: {error}") from None
    raise error or MeshError("registration ended")
