"""`python -m prefill_worker`: the only place that knows concrete classes."""

import asyncio
import sys

from engine.host import EngineLimits, Load
from engine.load import load_model_runner
from engine.loading import load_host
from engine.loop import EngineLoop, LoopCallbacks
from engine.reports import EngineReports
from kvtransfer import KVSender, TransferSettings
from mesh.domain.worker import WorkerRole
from mesh.malloc import keep_freed_memory
from mesh.metrics import serving_metrics
from mesh.process import ServiceProgram
from mesh.worker.runtime import RoleParts, WorkerRuntime
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.service import PrefillService
from prefill_worker.servicer import PrefillServicer
from prefill_worker.settings import PrefillSettings
from tandem.v1 import prefill_pb2_grpc


async def serve(settings: PrefillSettings, load: Load = load_model_runner) -> None:
    """Load, register, serve, drain, stop."""
    keep_freed_memory()
    limits = EngineLimits(settings.max_batch_prefill_tokens, settings.max_num_seqs)
    host = load_host(settings, limits, load)
    metrics = PrefillMetrics()
    service = PrefillService(settings.block_size, metrics)
    engine_died = asyncio.Event()
    callbacks = LoopCallbacks(service.on_step, lambda _: engine_died.set(), metrics.stepped)
    engine = EngineLoop(host.engine(service.on_layers), callbacks)
    runtime = WorkerRuntime(settings, host.worker_info(WorkerRole.PREFILL), EngineReports(engine))
    transfer_settings = TransferSettings(transports=tuple(settings.kv_transports.split(",")))
    sender = KVSender(host.runner.kv_cache, settings.identity, runtime.credentials, transfer_settings)
    service.connect(engine, sender, runtime.is_draining)
    runtime.tell(metrics)
    prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(service), runtime.server.grpc)
    engine.start()
    try:
        async with serving_metrics(metrics.registry, settings):
            await runtime.serve(RoleParts(("tandem.v1.Prefill",), service.drained, engine, engine_died))
    finally:
        await sender.close()
        await engine.stop()


if __name__ == "__main__":
    sys.exit(ServiceProgram("prefill_worker", PrefillSettings, serve).main())
