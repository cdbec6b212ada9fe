"""The role of a decode worker: its limits on the engine, and its services."""

from collections.abc import Sequence
from functools import partial

from decode_worker.service import DecodeService
from decode_worker.servicer import DecodeServicer
from decode_worker.settings import DecodeSettings
from engine.kv.sharded_cache import AnyKVCache
from engine.loop import EngineLoop
from engine.settings import graph_sizes
from kvtransfer import KVReceiver, MultiRankReceiver, ReceiverCallbacks, TransferSettings
from mesh.domain.worker import WorkerRole
from mesh.v1 import decode_pb2_grpc
from worker.metrics import DecodeMetrics
from worker.ranks.connection import RankConnection
from worker.role import Role, RoleServices
from worker.role_server import RoleServer
from worker.runner_settings import EngineLimits


def decode_role(settings: DecodeSettings) -> Role:
    """The role, for a worker with these settings. Downloads the draft model if needed. Raises ConfigurationError."""
    limits = EngineLimits(
        settings.step_tokens,
        settings.max_rolling_batch_size,
        settings.max_batch_total_tokens,
        settings.speculation(),
        settings.max_step_stretch,
        graph_sizes(settings.cuda_graphs, settings.max_rolling_batch_size),
    )
    return Role(WorkerRole.DECODE, limits, partial(_open, settings))


def _open(
    settings: DecodeSettings,
    engine: EngineLoop,
    kv_cache: AnyKVCache,
    rank_connections: Sequence[RankConnection],
    role_server: RoleServer,
) -> RoleServices:
    metrics = DecodeMetrics()
    incarnation = role_server.info.incarnation
    transfer_settings = TransferSettings(transports=settings.transports, trust_fabric=settings.trust_fabric)
    # The receiver calls `service`, which is built after it, and not before the server starts.
    receiver = MultiRankReceiver(
        lambda callbacks: KVReceiver(kv_cache, incarnation, callbacks, transfer_settings),
        rank_connections,
        ReceiverCallbacks(
            on_committed=lambda transfer_id, first_token_id: service.on_committed(transfer_id, first_token_id),
            on_failed=lambda transfer_id, error: service.on_transfer_failed(transfer_id, error),
        ),
    )
    service = DecodeService(
        engine,
        receiver,
        layout=kv_cache.layout,
        is_draining=role_server.is_draining,
        metrics=metrics,
    )
    decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(service, incarnation), role_server.server.grpc)
    receiver.own.add_to(role_server.server.grpc)
    return RoleServices(
        ("mesh.v1.Decode", "mesh.v1.KvTransfer"),
        metrics,
        service.on_step,
        drained=service.drained,
        close=receiver.close,
    )
