"""A worker's process after its engine is built: listen, register, serve, drain, stop.

Stop order: health becomes NOT_SERVING and new work is refused; an immediate heartbeat tells the routers; running work
finishes, or `drain_grace_s` ends; the server stops; the caller of `serve` stops the engine.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

import structlog

from mesh.domain.errors import ConfigurationError, MeshError
from mesh.domain.worker import WorkerInfo, WorkerState
from mesh.logs import flush_outputs
from mesh.process import announce, until_stopped
from mesh.rpc.credentials import MeshKey
from mesh.rpc.server import Listen, Server
from mesh.v1 import worker_pb2_grpc
from worker.agent import RegistryAgent, ReportSource
from worker.metrics import WorkerMetrics
from worker.servicer import WorkerServicer
from worker.settings import WorkerSettings
from worker.stall import StallLimits, StallWatch, Watched

log = structlog.get_logger(__name__)

_STOP_GRACE_S = 1.0


class WorkerRuntime:
    """A worker's server and registration. The constructor binds the server's port; `info` contains its address."""

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
        """Export the load and state of the heartbeats as metrics."""
        metrics.watch(self.info, lambda: self._agent.last_load, lambda: self._agent.state)

    def is_draining(self) -> bool:
        """Return True once the worker accepts no new work. Services check it before they accept work."""
        return self._agent.state is WorkerState.DRAINING

    async def serve(
        self,
        *,
        services: Sequence[str],
        drained: Callable[[], Coroutine[Any, Any, None]],
        engine: Watched,
        engine_died: asyncio.Event,
    ) -> None:
        """Serve until a signal stops the process. Raises ConfigurationError if the mesh refuses this worker, MeshError
        if its engine dies.

        `services` are full names of gRPC services, for reflection; `drained()` waits until the role's work is done.
        """
        await self.server.start((*services, "mesh.v1.Worker"))
        await self.server.set_serving(True)
        announce("ready")
        stopped = asyncio.create_task(until_stopped(self._settings))
        registered = asyncio.create_task(self._stay_registered())
        died = asyncio.create_task(engine_died.wait())
        watch = asyncio.create_task(self._watch(engine))
        try:
            await asyncio.wait([stopped, registered, died], return_when=asyncio.FIRST_COMPLETED)
            if registered.done():
                _raise_refusal(registered)
            await self._drain(drained, died)
            if died.done():
                raise MeshError("the engine died; the log has the details")
        finally:
            for task in (stopped, registered, died, watch):
                task.cancel()
            await self.server.stop(_STOP_GRACE_S)

    async def drain(self) -> None:
        """Set NOT_SERVING and refuse new work from now on. A heartbeat tells the routers at once."""
        await self._show(WorkerState.DRAINING)

    async def _show(self, state: WorkerState) -> None:
        """Report `state` in heartbeats and health checks. Ignored once the worker drains."""
        if not self.is_draining():
            self._agent.state = state
            self._agent.beat_now()
            # set_serving takes effect before its first await, so heartbeat and health always agree.
            await self.server.set_serving(state is WorkerState.READY)

    async def _watch(self, engine: Watched) -> None:
        """Report STALLED while the engine is stuck. End the process if the engine is wedged; a supervisor restarts
        it."""

        async def show(is_stalled: bool) -> None:
            await self._show(WorkerState.STALLED if is_stalled else WorkerState.READY)

        limits = StallLimits(self._settings.stall_after_s, self._settings.wedged_exit_s)
        await StallWatch(engine, limits, show).run()
        log.error("engine wedged, exiting", after_s=self._settings.wedged_exit_s)
        # An orderly exit is impossible: other threads may be stuck in the same driver. Routers see broken streams and
        # replay.
        flush_outputs()
        os._exit(1)

    async def _drain(self, drained: Callable[[], Coroutine[Any, Any, None]], died: asyncio.Task[Literal[True]]) -> None:
        """Drain, and wait until running work is done, `drain_grace_s` ends, or the engine dies."""
        await self.drain()
        work_done = asyncio.create_task(drained())
        either: list[asyncio.Future[Any]] = [work_done, died]
        await asyncio.wait(either, timeout=self._settings.drain_grace_s, return_when=asyncio.FIRST_COMPLETED)
        if not work_done.done():
            log.warning("stopping with work left", grace_s=self._settings.drain_grace_s)
            work_done.cancel()


def _registration(
    settings: WorkerSettings, key: MeshKey | None, agent: RegistryAgent
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return the coroutine function that keeps this worker registered. Raises ConfigurationError."""
    if not settings.registry_url:
        return lambda: agent.run(settings.registry_address)
    try:
        from worker.redis_agent import RedisAgent
    except ImportError as error:
        raise ConfigurationError("registry_url needs redis: install tandem-serve[redis]") from error
    return RedisAgent(settings.registry_url, key, agent).run


def _raise_refusal(registered: asyncio.Task[None]) -> NoReturn:
    error = registered.exception()
    if isinstance(error, MeshError):
        raise ConfigurationError(f"the router refuses this worker: {error}") from None
    raise error or MeshError("registration ended")
