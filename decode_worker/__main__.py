"""`python -m decode_worker`: builds the decode worker's objects and runs them."""

import sys

from decode_worker.service import DecodeService
from decode_worker.servicer import DecodeServicer
from decode_worker.settings import DecodeSettings
from kvtransfer import KVReceiver, KvTransferServicer, RankedReceiver, ReceiverCallbacks, TransferSettings
from mesh.domain.worker import WorkerRole
from mesh.process import ServiceProgram
from mesh.v1 import decode_pb2_grpc
from worker.engine_host import EngineLimits, Load, load_runner
from worker.metrics import DecodeMetrics
from worker.worker import Worker


async def serve(settings: DecodeSettings, load: Load = load_runner) -> None:
    """Load the model, then serve until stopped."""
    metrics = DecodeMetrics()
    limits = EngineLimits(
        settings.step_tokens,
        settings.max_rolling_batch_size,
        settings.max_batch_total_tokens,
        settings.speculation(),
        settings.max_step_stretch,
    )
    # The engine and the receiver call `service`, which is built last, and not before `worker.run`.
    worker = Worker(
        settings,
        WorkerRole.DECODE,
        limits,
        metrics,
        load=load,
        on_step=lambda result: service.on_step(result),
    )
    incarnation = worker.runtime.info.incarnation
    transfer_settings = TransferSettings(transports=settings.transports, trust_fabric=settings.trust_fabric)
    receiver = RankedReceiver(
        lambda callbacks: KVReceiver(worker.kv_cache, incarnation, callbacks, transfer_settings),
        worker.rank_links,
        ReceiverCallbacks(
            on_committed=lambda transfer_id, first_token: service.on_committed(transfer_id, first_token),
            on_failed=lambda transfer_id, error: service.on_transfer_failed(transfer_id, error),
        ),
    )
    service = DecodeService(
        worker.engine,
        receiver,
        block_size=settings.block_size,
        is_draining=worker.runtime.is_draining,
        metrics=metrics,
    )
    server = worker.runtime.server.grpc
    decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(service, incarnation), server)
    KvTransferServicer(receiver.own).register(server)
    await worker.run(("mesh.v1.Decode", "mesh.v1.KvTransfer"), drained=service.drained, close=receiver.close)


if __name__ == "__main__":
    sys.exit(ServiceProgram("decode_worker", DecodeSettings, serve).main())
