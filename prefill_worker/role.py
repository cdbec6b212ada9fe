"""The role of a prefill worker: its limits on the engine, and its services."""

from collections.abc import Sequence
from functools import partial

from engine.kv.sharded_cache import AnyKVCache
from engine.loop import EngineLoop
from kvtransfer import KVSender, MultiRankSender, TransferSettings
from mesh.domain.worker import WorkerRole
from mesh.v1 import prefill_pb2_grpc
from prefill_worker.service import PrefillService
from prefill_worker.servicer import PrefillServicer
from prefill_worker.settings import PrefillSettings
from worker.metrics import PrefillMetrics
from worker.ranks.connection import RankConnection
from worker.role import Role, RoleServices
from worker.role_server import RoleServer
from worker.runner_settings import EngineLimits


def prefill_role(settings: PrefillSettings) -> Role:
    """The role, for a worker with these settings."""
    limits = EngineLimits(settings.max_batch_prefill_tokens, settings.prompts_at_once)
    return Role(WorkerRole.PREFILL, limits, partial(_open, settings))


def _open(
    settings: PrefillSettings,
    engine: EngineLoop,
    kv_cache: AnyKVCache,
    rank_connections: Sequence[RankConnection],
    role_server: RoleServer,
) -> RoleServices:
    metrics = PrefillMetrics()
    transfer_settings = TransferSettings(transports=settings.transports, trust_fabric=settings.trust_fabric)
    own = KVSender(kv_cache, settings.identity, role_server.credentials, transfer_settings)
    sender = MultiRankSender(own, rank_connections)
    service = PrefillService(engine, sender, is_draining=role_server.is_draining, metrics=metrics)
    prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(service), role_server.server.grpc)
    return RoleServices(
        ("mesh.v1.Prefill",),
        metrics,
        service.on_step,
        drained=service.drained,
        close=sender.close,
        on_layers=service.on_layers,
    )
