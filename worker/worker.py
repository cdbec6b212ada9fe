"""Composition of a worker process: everything that prefill and decode workers do alike, and how a worker with both
roles goes from one to the other.

    load ─▶ role: open its services ─▶ register, serve ─▶ drain ─▶ close the services ─▶ stop the engine
                        ▲                                                  │
                        └── another role, with the same engine and KV ─────┘

Each role has a server, a registration and an incarnation of its own. When a worker changes its role, the rest of the
mesh sees one worker leave and another one join under the same name. Model and prefix cache stay.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace

import structlog

from engine.loop import EngineLoop
from mesh.domain.errors import ConfigurationError, MeshError
from mesh.domain.worker import WorkerRole
from mesh.metrics import serving_metrics, watching_loop
from mesh.process import keep_freed_memory, tell_parent, until_stopped
from mesh.rpc.server import require_free
from worker.load_engine import LoadRunner, download_and_load_engine
from worker.ranks.connection import set_up_kv
from worker.role import Role, RoleServices
from worker.role_server import RoleServer
from worker.runner_settings import widest
from worker.settings import WorkerSettings

log = structlog.get_logger(__name__)

_CHANGE_S = 60
"""How long the running step, and work that outlived the drain, may take before the next role begins. After that the
process ends, to be restarted.
"""
_SECOND_S = 1.0
_PORT_S = 5.0
_PORT_RETRY_S = 0.05


class Worker:
    """A loaded engine, which serves in one role at a time: first in the first of `roles`.

    The constructor loads the model. Raises ConfigurationError.
    """

    def __init__(self, settings: WorkerSettings, roles: Sequence[Role], *, load: LoadRunner) -> None:
        keep_freed_memory()
        self._settings = settings
        self._roles = {role.kind: role for role in roles}
        self._loaded = download_and_load_engine(settings, widest([role.limits for role in roles]), load)
        if len(roles) > 1 and self._loaded.rank_connections:
            raise ConfigurationError(
                "ranks that move their KV themselves do so in one role: start this worker as prefill or as decode "
                "worker, or with ranks that share memory"
            )
        self._engine_died = asyncio.Event()
        self._engine = EngineLoop(
            self._loaded.engine(),
            on_step=lambda result: self._services.on_step(result),
            on_death=lambda _: self._engine_died.set(),
            on_computed=lambda num_seqs, num_tokens, seconds: self._services.metrics.stepped(
                num_seqs, num_tokens, seconds
            ),
        )
        self._services: RoleServices
        self._role_server: RoleServer
        self._open(roles[0])

    async def run(self) -> None:
        """Start the engine and serve until stopped, in one role after the other; then stop the engine. Raises MeshError
        if the mesh refuses this worker, or its engine dies.
        """
        stopped = asyncio.create_task(until_stopped(self._settings, self._settings.watch_certificates))
        self._engine.start()
        try:
            while (next_role := await self._serve(stopped)) is not None:
                tell_parent("switching", role=next_role.value)
                await _await_free_port(self._settings.host, self._settings.port)
                self._open(self._roles[next_role])
            stopped.result()  # it may have failed, as on a stdin that cannot be followed
        finally:
            stopped.cancel()
            await self._engine.stop()

    def _open(self, role: Role) -> None:
        """Make what one role needs, with a new incarnation and a server that does not serve yet."""
        loaded = self._loaded
        info = loaded.worker_info(role.kind, role.limits, switchable=len(self._roles) > 1)
        info = replace(info, kv_endpoints=set_up_kv(loaded.rank_connections, self._settings, info))
        rank_pids = loaded.runner.rank_pids
        self._role_server = RoleServer(self._settings, info, self._engine, rank_pids)
        self._services = role.open(self._engine, loaded.runner.kv_cache, loaded.rank_connections, self._role_server)
        metrics = self._services.metrics
        metrics.loaded(loaded.load_seconds)
        self._role_server.export_load(metrics)
        if rank_pids:
            metrics.watch_ranks(rank_pids)
        if loaded.kv_disk is not None:
            metrics.watch_kv_disk(loaded.kv_disk.counts)

    async def _serve(self, stopped: "asyncio.Task[None]") -> WorkerRole | None:
        """Serve in the role that is open until stopped, or until another role is wanted, which is returned."""
        services = self._services
        registry = services.metrics.registry
        try:
            await self._plan_for(self._roles[self._role_server.info.role], services)
            async with serving_metrics(registry, self._settings), watching_loop(registry):
                next_role = await self._role_server.serve(
                    services=services.names,
                    drained=services.drained,
                    stopped=stopped,
                    engine_died=self._engine_died,
                )
            if next_role is not None:
                await _within_limit(services.drained())  # what the end of the server has aborted
            return next_role
        finally:
            await services.close()

    async def _plan_for(self, role: Role, services: RoleServices) -> None:
        """Let the engine plan by the limits of the role. Raises MeshError if work of the former role is left."""
        limits = role.limits
        config = replace(
            self._loaded.scheduler.config,
            max_batch_tokens=limits.max_batch_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_step_stretch=limits.max_step_stretch,
        )
        await _within_limit(self._engine.begin_role(config, services.on_layers))
        log.info("role", worker=self._settings.identity, role=role.kind.value)


async def _within_limit(coroutine: Coroutine[object, object, None]) -> None:
    """Seconds are counted one by one: a process that stood still, as on a machine that swaps, has used up one of them,
    and its engine's thread, which stood still, too, gets the others.
    """
    work = asyncio.ensure_future(coroutine)
    try:
        for _ in range(_CHANGE_S):
            done, _ = await asyncio.wait([work], timeout=_SECOND_S)
            if done:
                return work.result()
    finally:
        work.cancel()
    raise MeshError(f"the engine did not end its work within {_CHANGE_S} s, which the next role needs")


async def _await_free_port(host: str, port: int) -> None:
    """Wait until the former server has let go of the port. Raises ConfigurationError if it is in use for longer."""
    deadline_s = asyncio.get_running_loop().time() + _PORT_S
    while True:
        try:
            require_free(host, port)
            return
        except ConfigurationError:
            if asyncio.get_running_loop().time() > deadline_s:
                raise
        await asyncio.sleep(_PORT_RETRY_S)
