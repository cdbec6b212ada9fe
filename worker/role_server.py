"""A worker in one role, after its engine is built: listen, register, serve, drain, stop; and its reports of the engine.

Stop order: health becomes NOT_SERVING and new work is refused; an immediate heartbeat tells the routers; running work
finishes, or `drain_grace_s` ends; a last heartbeat says farewell; the server stops; the caller of `serve` stops the
engine, or gives it another role.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import structlog

from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from mesh.domain.errors import ConfigurationError, InvalidRequest, MeshError, WorkerDraining, missing_extra
from mesh.domain.host import join_host
from mesh.domain.worker import WorkerInfo, WorkerLoad, WorkerRole, WorkerState
from mesh.logs import flush_outputs
from mesh.process import run_for_life, tell_parent
from mesh.rpc.credentials import MeshKey
from mesh.rpc.server import Listen, Server
from mesh.v1 import worker_pb2_grpc
from worker.metrics import WorkerMetrics
from worker.ranks.states import log_ranks
from worker.registration import CacheSnapshot, Registration, Report
from worker.servicer import WorkerServicer
from worker.settings import WorkerSettings
from worker.stall_watch import watch_stalls

log = structlog.get_logger(__name__)

_STOP_GRACE_S = 1.0
_FAREWELL_S = 5.0
# A worker that is not registered, because its registry does not answer, stops after this time: it may be about to be.
_REGISTERING_S = 0.5


class RoleServer:
    """The server and registration of a worker in one role. The constructor binds the server's port; `info` contains its
    address. Implements worker.registration.ReportSource: reports are made on the engine's thread, between two steps.

    `rank_pids` are the process ids of ranks 1 and up.
    """

    def __init__(
        self, settings: WorkerSettings, info: WorkerInfo, engine: EngineLoop, rank_pids: Sequence[int] = ()
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._rank_pids = rank_pids
        self.credentials = settings.load_credentials()
        listen = Listen(settings.host, settings.port, self.credentials.key, tls=self.credentials.tls)
        self.server = Server(listen)
        address = join_host(settings.advertise_host or settings.host, self.server.port)
        # The leader's own KV has the address of the worker, which is known now.
        endpoints = tuple(replace(endpoint, address=endpoint.address or address) for endpoint in info.kv_endpoints)
        self.info = replace(info, address=address, kv_endpoints=endpoints)
        self._registration = Registration(self.info, self, self.credentials)
        self._stay_registered = _staying_registered(settings, self.credentials.key, self._registration)
        self._is_stopping = self._is_out_of_service = self._is_stalled = False
        self._left_as: WorkerState | None = None
        self._next_role: WorkerRole | None = None
        self._next_role_changed = asyncio.Event()
        servicer = WorkerServicer(self.info, self, self.set_draining, self.switch_role)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, self.server.grpc)
        tell_parent("listening", address=self.info.address)

    def export_load(self, metrics: WorkerMetrics) -> None:
        """Add the load and state of the heartbeats to the metrics."""
        metrics.watch(self.info, lambda: self._registration.last_load, lambda: self._registration.state)

    def is_draining(self) -> bool:
        """Return True once the worker accepts no new work. Services check it before they accept work."""
        return self._registration.state is WorkerState.DRAINING or self._registration.state.is_gone

    async def serve(
        self,
        *,
        services: Sequence[str],
        drained: Callable[[], Coroutine[object, object, None]],
        stopped: "asyncio.Task[None]",
        engine_died: asyncio.Event,
    ) -> WorkerRole | None:
        """Serve until `stopped` is done, or until the worker is to have another role, which is returned. Either way
        drain before. Raises ConfigurationError if the mesh refuses this worker, MeshError if its engine dies.

        `services` are full names of gRPC services, for reflection; `drained()` waits until the role's work is done.
        """
        await self.server.start((*services, "mesh.v1.Worker"))
        self.server.set_serving(True)
        await asyncio.sleep(0)  # a signal to a worker that is ready drains it
        tell_parent("ready")
        registered = asyncio.create_task(self._stay_registered())
        died = asyncio.create_task(engine_died.wait())
        watch = run_for_life(self._watch())
        ends: tuple[asyncio.Task[Any], ...] = (stopped, registered, died)
        try:
            next_role = await self._until_switched(drained, ends)
            if registered.done():
                _raise_refusal(registered)
            if next_role is None:
                self._is_stopping = True
                self._publish_state()
                await self._drain(drained, (died,))
            if died.done():
                raise MeshError("the engine died; the log has the details")
            self._left_as = WorkerState.STOPPED if next_role is None else WorkerState.SWITCHING
            self._publish_state()
            await asyncio.wait([registered], timeout=_FAREWELL_S if self._registration.is_heard else _REGISTERING_S)
            return next_role
        finally:
            own_tasks = (registered, died, watch)
            for task in own_tasks:
                task.cancel()
            await self.server.stop(_STOP_GRACE_S)
            # A registration in Redis is removed, which must not happen to that of the next role.
            await asyncio.gather(*own_tasks, return_exceptions=True)

    async def _until_switched(
        self, drained: Callable[[], Coroutine[object, object, None]], ends: Sequence[asyncio.Task[Any]]
    ) -> WorkerRole | None:
        """Return the next role once the worker has drained for it; None once one of `ends` is done."""
        while not any(end.done() for end in ends):
            self._next_role_changed.clear()
            role_changed = asyncio.create_task(self._next_role_changed.wait())
            next_role = self._next_role
            try:
                if next_role is None:
                    await asyncio.wait([*ends, role_changed], return_when=asyncio.FIRST_COMPLETED)
                else:
                    await self._drain(drained, (*ends, role_changed))
                has_changed = role_changed.done() or self._next_role is not next_role
            finally:
                role_changed.cancel()
            if next_role is not None and not has_changed and not any(end.done() for end in ends):
                return next_role
        return None

    async def report(self) -> Report:
        return await self._engine.call(_report)

    async def load(self) -> WorkerLoad:
        return await self._engine.call(Scheduler.load)

    async def snapshot(self) -> CacheSnapshot:
        return await self._engine.call(_snapshot)

    async def set_draining(self, is_drained: bool) -> None:
        """For an operator: finish running work and accept no new work, or accept it again. Routers hear at once. Either
        way the worker keeps its role. Raises WorkerDraining if it has already left the mesh for another role."""
        self._require_not_switched()
        log.warning("an operator changes this worker", draining=is_drained)
        self._is_out_of_service = is_drained
        self._set_next_role(None)

    async def switch_role(self, role: WorkerRole) -> None:
        """Drain, then serve in this role; routers hear at once. With the role that the worker has, a switch that is
        under way is taken back, and the worker is in service. Raises InvalidRequest if the worker has one role only,
        WorkerDraining if the process is stopping, or has already left the mesh for another role.
        """
        if role is not self.info.role and not self.info.switchable:
            raise InvalidRequest(
                f"worker {self.info.worker_id} cannot change its role: start it with `tandem up --switchable`, or as "
                "python -m switchable_worker"
            )
        if self._is_stopping:
            raise WorkerDraining(f"worker {self.info.worker_id} is stopping")
        self._require_not_switched()
        log.warning("this worker is to change its role", role=self.info.role.value, next_role=role.value)
        self._is_out_of_service = False
        self._set_next_role(None if role is self.info.role else role)

    def _require_not_switched(self) -> None:
        """Refuse orders that would be lost: after the farewell this role only ends."""
        if self._left_as is WorkerState.SWITCHING:
            raise WorkerDraining(f"worker {self.info.worker_id} is changing its role: ask again once it has joined")

    def _set_next_role(self, role: WorkerRole | None) -> None:
        if role is not self._next_role:
            self._next_role = role
            self._next_role_changed.set()
        self._publish_state()

    def _publish_state(self) -> None:
        """Report the state in heartbeats and health checks."""
        is_draining = self._is_stopping or self._is_out_of_service or self._next_role is not None
        healthy = WorkerState.STALLED if self._is_stalled else WorkerState.READY
        self._registration.state = self._left_as or (WorkerState.DRAINING if is_draining else healthy)
        self._registration.heartbeat_now()
        self.server.set_serving(self._registration.state is WorkerState.READY)

    async def _watch(self) -> None:
        """Report STALLED while the engine is stuck. End the process if the engine is wedged; a supervisor restarts
        it."""

        async def show(is_stalled: bool) -> None:
            self._is_stalled = is_stalled
            self._publish_state()
            if is_stalled and self._rank_pids:
                await log_ranks(self._rank_pids)

        settings = self._settings
        await watch_stalls(
            self._engine, stall_after_s=settings.stall_after_s, wedged_exit_s=settings.wedged_exit_s, on_change=show
        )
        log.error("engine wedged, exiting", after_s=settings.wedged_exit_s)
        # An orderly exit is impossible: other threads may be stuck in the same driver. Routers see broken streams and
        # replay.
        flush_outputs()
        os._exit(1)

    async def _drain(
        self, drained: Callable[[], Coroutine[object, object, None]], ends: Sequence[asyncio.Task[Any]]
    ) -> None:
        """Wait until running work is done, `drain_grace_s` ends, or one of `ends` is done."""
        work_done = asyncio.create_task(drained())
        grace_s = self._settings.drain_grace_s
        try:
            done, _ = await asyncio.wait([work_done, *ends], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                log.warning("stopping with work left", grace_s=grace_s)
        finally:
            work_done.cancel()


def _staying_registered(
    settings: WorkerSettings, key: MeshKey | None, registration: Registration
) -> Callable[[], Coroutine[object, object, None]]:
    """Return the coroutine function that keeps this worker registered. Raises ConfigurationError."""
    if not settings.registry_url:
        return lambda: registration.run(settings.registry_address)
    try:
        from worker.redis_registration import RedisRegistration
    except ImportError as error:
        raise missing_extra("registry_url needs redis", "redis") from error
    return RedisRegistration(settings.registry_url, key, registration).run


def _raise_refusal(registered: asyncio.Task[None]) -> NoReturn:
    error = registered.exception()
    if isinstance(error, MeshError):
        raise ConfigurationError(f"the router refuses this worker: {error}") from None
    raise error or MeshError("registration ended")


def _report(scheduler: Scheduler) -> Report:
    first_event, events = scheduler.pool.log.take()
    return Report(scheduler.load(), first_event, events)


def _snapshot(scheduler: Scheduler) -> CacheSnapshot:
    scheduler.pool.log.take()
    return CacheSnapshot(scheduler.load(), scheduler.pool.log.next_number, scheduler.pool.indexed_hashes)
