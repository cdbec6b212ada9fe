"""Composition of a worker process: everything that prefill and decode workers do alike."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace

from engine.loop import EngineLoop, LoopCallbacks, StepResult
from engine.runner import LayerHook
from mesh.domain.worker import WorkerRole
from mesh.metrics import serving_metrics, watching_loop
from mesh.process import keep_freed_memory
from worker.engine_host import EngineLimits, Load, load_host
from worker.metrics import WorkerMetrics
from worker.rank_link import set_up_kv
from worker.runtime import EngineReports, WorkerRuntime
from worker.settings import WorkerSettings


class Worker:
    """A loaded engine with its thread, metrics, gRPC server and registration.

    The constructor loads the model. The engine calls `on_step` on the event loop and `on_layers` on its thread, but not
    before `run`, so both may refer to a service that is built after the worker. Raises ConfigurationError.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        role: WorkerRole,
        limits: EngineLimits,
        metrics: WorkerMetrics,
        *,
        load: Load,
        on_step: Callable[[StepResult], None],
        on_layers: LayerHook | None = None,
    ) -> None:
        keep_freed_memory()
        host = load_host(settings, limits, load)
        self.kv_cache = host.runner.kv_cache
        metrics.loaded(host.load_seconds)
        self._settings = settings
        self._metrics = metrics
        self._engine_died = asyncio.Event()
        callbacks = LoopCallbacks(on_step, lambda _: self._engine_died.set(), metrics.stepped)
        self.engine = EngineLoop(host.engine(on_layers), callbacks)
        self.rank_links = host.rank_links
        rank_pids = host.runner.rank_pids
        info = host.worker_info(role)
        info = replace(info, kv_endpoints=set_up_kv(self.rank_links, settings, info))
        self.runtime = WorkerRuntime(settings, info, EngineReports(self.engine), rank_pids)
        self.runtime.export_load(metrics)
        if rank_pids:
            metrics.watch_ranks(rank_pids)
        if host.kv_disk is not None:
            metrics.watch_kv_disk(host.kv_disk.counts)

    async def run(
        self,
        services: Sequence[str],
        *,
        drained: Callable[[], Coroutine[object, object, None]],
        close: Callable[[], Coroutine[object, object, None]],
    ) -> None:
        """Start the engine, serve until stopped, drain, `close()` the KV transfers, and stop the engine."""
        self.engine.start()
        registry = self._metrics.registry
        try:
            async with serving_metrics(registry, self._settings), watching_loop(registry):
                await self.runtime.serve(
                    services=services, drained=drained, engine=self.engine, engine_died=self._engine_died
                )
        finally:
            await close()
            await self.engine.stop()
