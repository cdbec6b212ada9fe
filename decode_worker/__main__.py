"""`python -m decode_worker`: the only place that knows concrete classes."""

import asyncio
import sys

from decode_worker.metrics import DecodeMetrics
from decode_worker.service import DecodeService
from decode_worker.servicer import DecodeServicer
from decode_worker.settings import DecodeSettings
from engine.host import EngineLimits, Load
from engine.load import load_model_runner
from engine.loading import load_host
from engine.loop import EngineLoop, LoopCallbacks
from engine.reports import EngineReports
from kvtransfer import KVReceiver, KvTransferServicer, ReceiverCallbacks, TransferSettings
from mesh.domain.worker import WorkerRole
from mesh.malloc import keep_freed_memory
from mesh.metrics import serving_metrics
from mesh.process import ServiceProgram
from mesh.worker.runtime import RoleParts, WorkerRuntime
from tandem.v1 import decode_pb2_grpc


async def serve(settings: DecodeSettings, load: Load = load_model_runner) -> None:
    """Load, register, serve, drain, stop."""
    keep_freed_memory()
    limits = EngineLimits(
        settings.max_step_tokens,
        settings.max_rolling_batch_size,
        settings.max_batch_total_tokens,
        settings.speculation(),
    )
    host = load_host(settings, limits, load)
    metrics = DecodeMetrics()
    service = DecodeService(settings.block_size, metrics)
    engine_died = asyncio.Event()
    callbacks = LoopCallbacks(service.on_step, lambda _: engine_died.set(), metrics.stepped)
    engine = EngineLoop(host.engine(), callbacks)
    runtime = WorkerRuntime(settings, host.worker_info(WorkerRole.DECODE), EngineReports(engine))
    receiver = KVReceiver(
        host.runner.kv_cache,
        runtime.info.incarnation,
        ReceiverCallbacks(service.on_committed, service.on_transfer_failed),
        TransferSettings(transports=tuple(settings.kv_transports.split(","))),
    )
    service.connect(engine, receiver, runtime.is_draining)
    runtime.tell(metrics)
    server = runtime.server.grpc
    decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(service, runtime.info.incarnation), server)
    KvTransferServicer(receiver).register(server)
    engine.start()
    try:
        services = ("tandem.v1.Decode", "tandem.v1.KvTransfer")
        async with serving_metrics(metrics.registry, settings):
            await runtime.serve(RoleParts(services, service.drained, engine, engine_died))
    finally:
        await receiver.close()
        await engine.stop()


if __name__ == "__main__":
    sys.exit(ServiceProgram("decode_worker", DecodeSettings, serve).main())
