"""`python -m prefill_worker`: builds the prefill worker's objects and runs them."""

import sys

from kvtransfer import KVSender, RankedSender, TransferSettings
from mesh.domain.worker import WorkerRole
from mesh.process import ServiceProgram
from mesh.v1 import prefill_pb2_grpc
from prefill_worker.service import PrefillService
from prefill_worker.servicer import PrefillServicer
from prefill_worker.settings import PrefillSettings
from worker.engine_host import EngineLimits, Load, load_runner
from worker.metrics import PrefillMetrics
from worker.worker import Worker


async def serve(settings: PrefillSettings, load: Load = load_runner) -> None:
    """Load the model, then serve until stopped."""
    metrics = PrefillMetrics()
    # The engine calls `service`, which is built last, and not before `worker.run`.
    worker = Worker(
        settings,
        WorkerRole.PREFILL,
        EngineLimits(settings.max_batch_prefill_tokens, settings.prompts_at_once),
        metrics,
        load=load,
        on_step=lambda result: service.on_step(result),
        on_layers=lambda batch, first_layer, num_layers: service.on_layers(batch, first_layer, num_layers),
    )
    transfer_settings = TransferSettings(transports=settings.transports, trust_fabric=settings.trust_fabric)
    sender = KVSender(worker.kv_cache, settings.identity, worker.runtime.credentials, transfer_settings)
    service = PrefillService(
        worker.engine,
        RankedSender(sender, worker.rank_links),
        block_size=settings.block_size,
        is_draining=worker.runtime.is_draining,
        metrics=metrics,
    )
    prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(service), worker.runtime.server.grpc)
    await worker.run(("mesh.v1.Prefill",), drained=service.drained, close=sender.close)


if __name__ == "__main__":
    sys.exit(ServiceProgram("prefill_worker", PrefillSettings, serve).main())
