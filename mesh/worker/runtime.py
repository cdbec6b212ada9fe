"""A worker's process after its engine is built: listen, register, serve, drain, stop.

Stop order: health says NOT_SERVING and new work is refused, at once; routers hear of it with the next beat; running
work ends, or `drain_grace_s` does; the server stops; whoever called `serve` stops the engine.
"""

import asyncio
import os
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
from mesh.worker.metrics import WorkerMetrics
from mesh.worker.servicer import WorkerServicer
from mesh.worker.settings import WorkerSettings
from mesh.worker.stall import StallLimits, StallWatch, Watched
from tandem.v1 import worker_pb2_grpc

log = structlog.get_logger(__name__)

_STOP_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class RoleParts:
    """What a role brings: the names of its services, how to wait for its work to end, its engine, and news of that
    one's death.
    """

    services: tuple[str, ...]
    drained: Callable[[], Awaitable[None]]
    engine: Watched
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

    def tell(self, metrics: WorkerMetrics) -> None:
        """Let `metrics` have what beats say."""
        metrics.watch(self.info, lambda: self._agent.last_load, lambda: self._agent.state)

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
        watch = asyncio.create_task(self._watch(role.engine))
        try:
            await asyncio.wait([stopped, registered, died], return_when=asyncio.FIRST_COMPLETED)
            if registered.done():
                _raise_refusal(registered)
            await self._drain(role, died)
            if died.done():
                raise MeshError("the engine died; the log has the details")
        finally:
            for task in (stopped, registered, died, watch):
                task.cancel()
            await self.server.stop(_STOP_GRACE_S)

    async def drain(self) -> None:
        """NOT_SERVING and nothing new, from now on; routers hear of it with the next beat, which is sent at once."""
        await self._show(WorkerState.DRAINING)

    async def _show(self, state: WorkerState) -> None:
        """Say `state` in beats and in health checks; draining is for good."""
        if not self.is_draining():
            self._agent.state = state
            self._agent.beat_now()
            # Takes effect before it waits for anything, so nobody sees one without the other.
            await self.server.set_serving(state is WorkerState.READY)

    async def _watch(self, engine: Watched) -> None:
        """Not ready while the engine is stalled; and if it never comes back, out, so that a supervisor starts anew."""

        async def show(is_stalled: bool) -> None:
            await self._show(WorkerState.STALLED if is_stalled else WorkerState.READY)

        limits = StallLimits(self._settings.stall_after_s, self._settings.wedged_exit_s)
        await StallWatch(engine, limits, show).run()
        log.error("engine wedged, exiting", after_s=self._settings.wedged_exit_s)
        # No orderly way out: threads may be stuck in the same driver. Routers see broken streams and replay.
        os._exit(1)

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
