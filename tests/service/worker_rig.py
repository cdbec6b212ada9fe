"""A prefill and a decode worker around fake runners, with real gRPC between them, in one process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from decode_worker.metrics import DecodeMetrics
from decode_worker.service import DecodeService
from decode_worker.servicer import DecodeServicer
from engine.block_pool import BlockPool
from engine.loop import Engine, EngineLoop, LoopCallbacks
from engine.scheduler import Scheduler, SchedulerConfig
from engine.speculation.speculator import Speculator
from kvtransfer import KVReceiver, KVSender, KvTransferServicer, ReceiverCallbacks, TransferSettings
from mesh.rpc.credentials import Credentials, MeshKey
from mesh.rpc.server import Listen, Server
from mesh.rpc.tls import TlsIdentity
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.service import PrefillService
from prefill_worker.servicer import PrefillServicer
from tandem.v1 import decode_pb2_grpc, prefill_pb2_grpc
from tests.fakes.runner import FAKE_LAYOUT, FakeKVStore, FakeRunner

MESH_KEY = MeshKey("a-key-for-tests-only")
NUM_BLOCKS = 64
INCARNATION = "first-life"
GRPC_TRANSFERS = TransferSettings(transports=("grpc",))


async def until(condition: Callable[[], bool], within_s: float = 2.0) -> None:
    """Return once `condition` holds; TimeoutError if it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - conditions of other threads announce nothing
            await asyncio.sleep(0.005)


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
    ) -> "EngineRig":
        config = SchedulerConfig(FAKE_LAYOUT.block_size, max_batch_tokens, max_num_seqs, max_model_len=200)
        scheduler = Scheduler(config, BlockPool(num_blocks))
        return cls(scheduler, FakeRunner(FakeKVStore(num_blocks)), asyncio.Event(), speculator)

    async def wait_whole(self, loop: EngineLoop, within_s: float = 2.0) -> None:
        """Return once every block is free again; raise if that takes too long."""

        def check(scheduler: Scheduler) -> None:
            scheduler.check_integrity()

        await until(lambda: self.scheduler.pool.num_free == self.scheduler.pool.num_blocks, within_s)
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

    async def wait_whole(self, within_s: float = 2.0) -> None:
        """Both pools are whole again."""
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
        prefill_service = PrefillService(FAKE_LAYOUT.block_size, prefill_metrics)
        decode_service = DecodeService(FAKE_LAYOUT.block_size, decode_metrics)
        prefill_callbacks = LoopCallbacks(
            prefill_service.on_step, lambda _: prefill.died.set(), prefill_metrics.stepped
        )
        prefill_engine = EngineLoop(
            Engine(prefill.scheduler, prefill.runner, prefill_service.on_layers), prefill_callbacks
        )
        decode_callbacks = LoopCallbacks(decode_service.on_step, lambda _: decode.died.set(), decode_metrics.stepped)
        decode_engine = EngineLoop(
            Engine(decode.scheduler, decode.runner, speculator=decode.speculator), decode_callbacks
        )
        sender = KVSender(prefill.runner.store, "prefill-0", Credentials(MESH_KEY, tls), settings)
        receiver_callbacks = ReceiverCallbacks(decode_service.on_committed, decode_service.on_transfer_failed)
        receiver = KVReceiver(decode.runner.store, INCARNATION, receiver_callbacks, settings)
        prefill_service.connect(prefill_engine, sender, draining.is_set)
        decode_service.connect(decode_engine, receiver, draining.is_set)
        prefill_server = Server(Listen("127.0.0.1", 0, MESH_KEY, tls=tls))
        prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(prefill_service), prefill_server.grpc)
        decode_server = Server(Listen("127.0.0.1", 0, MESH_KEY, tls=tls))
        decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(decode_service, INCARNATION), decode_server.grpc)
        KvTransferServicer(receiver).register(decode_server.grpc)
        for engine in (prefill_engine, decode_engine):
            engine.start()
            stack.push_async_callback(engine.stop)
        stack.push_async_callback(sender.close)
        stack.push_async_callback(receiver.close)
        for server, name in ((prefill_server, "tandem.v1.Prefill"), (decode_server, "tandem.v1.Decode")):
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
