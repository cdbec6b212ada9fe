"""A prefill and a decode worker around fake runners, with real gRPC between them, in one process."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from decode_worker.service import DecodeService
from decode_worker.servicer import DecodeServicer
from engine.engine import Engine
from engine.kv.block_pool import BlockPool
from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from engine.settings import SchedulerConfig
from engine.speculation.speculator import Speculator
from kvtransfer import (
    KVReceiver,
    KVSender,
    MultiRankReceiver,
    MultiRankSender,
    ReceiverCallbacks,
    TransferSettings,
)
from mesh.rpc.credentials import Credentials, MeshKey, TlsIdentity
from mesh.rpc.server import Listen, Server
from mesh.v1 import decode_pb2_grpc, prefill_pb2_grpc
from prefill_worker.service import PrefillService
from prefill_worker.servicer import PrefillServicer
from tests.fakes.runner import FAKE_LAYOUT, FakeKVStore, FakeRunner
from tests.waiting import LIMIT_S, until
from worker.metrics import DecodeMetrics, PrefillMetrics

MESH_KEY = MeshKey("a-key-for-tests-only")
NUM_BLOCKS = 64
INCARNATION = "first-life"
GRPC_TRANSFERS = TransferSettings(transports=("grpc",))


@dataclass
class EngineRig:
    """An engine over a FakeRunner, and how to see whether its pool is whole."""

    scheduler: Scheduler
    runner: FakeRunner
    died: asyncio.Event
    speculator: Speculator | None = None

    @classmethod
    def make(
        cls,
        *,
        num_blocks: int = NUM_BLOCKS,
        max_batch_tokens: int = 16,
        max_num_seqs: int = 16,
        speculator: Speculator | None = None,
        state_blocks: int = 0,
        windows: tuple[int, ...] = (),
    ) -> "EngineRig":
        facts = {"state_blocks": state_blocks, "windows": windows}
        layout = replace(FAKE_LAYOUT, **facts)
        config = SchedulerConfig(layout.block_size, max_batch_tokens, max_num_seqs, max_model_len=200, **facts)
        scheduler = Scheduler(config, BlockPool(num_blocks))
        return cls(scheduler, FakeRunner(FakeKVStore(num_blocks, layout)), asyncio.Event(), speculator)

    async def wait_whole(self, loop: EngineLoop, within_s: float = LIMIT_S) -> None:
        """Return once every block is free again; raise TimeoutError if that takes too long."""

        def check(scheduler: Scheduler) -> None:
            scheduler.check_integrity()

        pool = self.scheduler.pool
        await until(
            lambda: pool.num_free == pool.num_blocks - self.runner.store.layout.num_unused,
            within_s=within_s,
            state=lambda: f"{pool.num_free} of {pool.num_blocks} blocks are free",
        )
        await loop.call(check)


@dataclass
class WorkerRig:
    """Both workers."""

    prefill: EngineRig
    decode: EngineRig
    prefill_engine: EngineLoop
    decode_engine: EngineLoop
    prefill_service: PrefillService
    decode_service: DecodeService
    prefill_address: str
    decode_address: str
    draining: asyncio.Event
    tls: TlsIdentity | None
    prefill_metrics: PrefillMetrics
    decode_metrics: DecodeMetrics

    def begin_together(self, num_seqs: int) -> None:
        """Let the decode engine compute nothing until so many sequences wait for it. Call it before they start."""

        def hold(scheduler: Scheduler) -> None:
            if scheduler.load().num_waiting < num_seqs:
                time.sleep(0.001)  # meanwhile the event loop brings them
                self.decode_engine.post(hold)

        self.decode_engine.post(hold)

    async def wait_whole(self, within_s: float = LIMIT_S) -> None:
        """Return once every block of both pools is free again; raise TimeoutError if that takes too long."""
        await self.prefill.wait_whole(self.prefill_engine, within_s)
        await self.decode.wait_whole(self.decode_engine, within_s)


@asynccontextmanager
async def worker_rig(
    *,
    prefill: EngineRig | None = None,
    decode: EngineRig | None = None,
    settings: TransferSettings = GRPC_TRANSFERS,
    tls: TlsIdentity | None = None,
) -> AsyncIterator[WorkerRig]:
    """Run both workers; at the end, once clients have gone, their pools must be whole."""
    prefill, decode = prefill or EngineRig.make(), decode or EngineRig.make()
    draining = asyncio.Event()
    async with AsyncExitStack() as stack:
        prefill_metrics, decode_metrics = PrefillMetrics(), DecodeMetrics()
        prefill_engine = EngineLoop(
            Engine(prefill.scheduler, prefill.runner, on_layers=lambda *layers: prefill_service.on_layers(*layers)),
            on_step=lambda result: prefill_service.on_step(result),
            on_death=lambda _: prefill.died.set(),
            on_computed=prefill_metrics.stepped,
        )
        decode_engine = EngineLoop(
            Engine(decode.scheduler, decode.runner, speculator=decode.speculator),
            on_step=lambda result: decode_service.on_step(result),
            on_death=lambda _: decode.died.set(),
            on_computed=decode_metrics.stepped,
        )
        sender = KVSender(prefill.runner.store, "prefill-0", Credentials(MESH_KEY, tls), settings)
        receiver_callbacks = ReceiverCallbacks(
            lambda *commit: decode_service.on_committed(*commit),
            lambda *failure: decode_service.on_transfer_failed(*failure),
        )
        receiver = MultiRankReceiver(
            lambda callbacks: KVReceiver(decode.runner.store, INCARNATION, callbacks, settings), (), receiver_callbacks
        )
        prefill_service = PrefillService(
            prefill_engine,
            MultiRankSender(sender),
            is_draining=draining.is_set,
            metrics=prefill_metrics,
        )
        decode_service = DecodeService(
            decode_engine,
            receiver,
            layout=decode.runner.store.layout,
            is_draining=draining.is_set,
            metrics=decode_metrics,
        )
        prefill_server = Server(Listen("127.0.0.1", 0, MESH_KEY, tls=tls))
        prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(prefill_service), prefill_server.grpc)
        decode_server = Server(Listen("127.0.0.1", 0, MESH_KEY, tls=tls))
        decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(decode_service, INCARNATION), decode_server.grpc)
        receiver.own.add_to(decode_server.grpc)
        for engine in (prefill_engine, decode_engine):
            engine.start()
            stack.push_async_callback(engine.stop)
        stack.push_async_callback(sender.close)
        stack.push_async_callback(receiver.close)
        for server, name in ((prefill_server, "mesh.v1.Prefill"), (decode_server, "mesh.v1.Decode")):
            await server.start([name])
            stack.push_async_callback(server.stop, 0)
        rig = WorkerRig(
            prefill,
            decode,
            prefill_engine,
            decode_engine,
            prefill_service,
            decode_service,
            prefill_server.address,
            decode_server.address,
            draining,
            tls,
            prefill_metrics,
            decode_metrics,
        )
        yield rig
        if not (prefill.died.is_set() or decode.died.is_set()):
            await rig.wait_whole()
