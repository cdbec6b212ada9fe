"""The rank's part of KV transfers. The leader says what comes and what goes; KV itself goes from rank to rank."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from engine.kv.cache import KVCache
from kvtransfer import (
    SERVICE_NAME,
    ExpectedTransfer,
    KVReceiver,
    KVSender,
    OutgoingTransfer,
    ReceiverCallbacks,
    TransferSettings,
    TransferSpec,
)
from mesh import wire
from mesh.domain.errors import MeshError, TransferFailed, WorkerLost
from mesh.domain.kv import Span
from mesh.rpc.server import Listen, Server
from mesh.tasks import spawn
from mesh.v1 import rank_pb2
from rank_worker.settings import RankSettings
from tandem.v1.sampling_pb2 import SampledToken

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Expected:
    transfer_id: str
    outcome: "asyncio.Future[int]"


class RankKV:
    """Follows the leader's orders about the KV in `cache`, on the event loop. `host` is this machine's address at which
    prefill workers reach it. `report` sends what came of an order to the leader.
    """

    def __init__(
        self, cache: KVCache, settings: RankSettings, host: str, report: Callable[[rank_pb2.KvReport], None]
    ) -> None:
        self._cache = cache
        self._settings = settings
        self._host = host
        self._report = report
        self._sender: KVSender | None = None
        self._receiver: KVReceiver | None = None
        self._server: Server | None = None
        self._sends: dict[int, OutgoingTransfer] = {}
        self._expected: dict[int, _Expected] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, order: rank_pb2.KvOrder) -> None:
        """Begin to do it; answers come later. Raises ValueError for an order that the rank does not expect."""
        number = order.number
        match order.WhichOneof("request"):
            case "setup":
                self._spawn(number, self._set_up(order.setup))
            case "clear":
                self._spawn(number, self._clear(order.clear))
            case "expect":
                self._spawn(number, self._expect(number, order.expect))
            case "collect":
                self._spawn(number, self._collect(order.collect.expect))
            case "send":
                self._send(number, order.send)
            case "announce":
                announced = order.announce
                if (transfer := self._sends.get(announced.send)) is not None:
                    blocks = Span(announced.first_block, announced.num_blocks)
                    transfer.announce(blocks, Span(announced.first_layer, announced.num_layers))
            case "finish":
                if (transfer := self._sends.get(order.finish.send)) is not None:
                    transfer.finish(order.finish.num_tokens, order.finish.first_token.id)
            case "abort":
                self._spawn(number, self._abort(order.abort.request))
            case other:
                raise ValueError(f"the leader sent {other}")

    async def close(self) -> None:
        if self._sender is not None:
            await self._sender.close()
        if self._receiver is not None:
            await self._receiver.close()
        if self._server is not None:
            await self._server.stop(0)

    async def _set_up(self, setup: rank_pb2.KvSetup) -> rank_pb2.KvReport:
        credentials = self._settings.load_credentials()
        settings = TransferSettings(transports=tuple(setup.transports), trust_fabric=self._settings.trust_fabric)
        if not setup.incarnation:
            name = f"{setup.worker_id} rank {self._settings.rank}"
            self._sender = KVSender(self._cache, name, credentials, settings)
            return rank_pb2.KvReport()
        callbacks = ReceiverCallbacks(self._on_committed, self._on_failed)
        self._receiver = KVReceiver(self._cache, setup.incarnation, callbacks, settings)
        host = self._settings.kv_host or self._host
        self._server = Server(Listen(host, 0, credentials.key, tls=credentials.tls))
        self._receiver.add_to(self._server.grpc)
        await self._server.start([SERVICE_NAME])
        log.info("taking KV", address=self._server.address)
        return rank_pb2.KvReport(port=self._server.port)

    async def _clear(self, clear: rank_pb2.KvClear) -> rank_pb2.KvReport:
        await asyncio.to_thread(self._cache.clear_blocks, list(clear.block_ids), clear.first_token)
        return rank_pb2.KvReport()

    async def _expect(self, number: int, expect: rank_pb2.KvExpect) -> rank_pb2.KvReport:
        assert self._receiver is not None, "the rank is of a prefill worker"
        self._receiver.expect(
            ExpectedTransfer(
                transfer_id=expect.transfer_id,
                attempt=expect.attempt,
                block_ids=tuple(expect.block_ids),
                first_block=expect.first_block,
                num_tokens=expect.num_tokens,
            )
        )
        outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._expected[number] = _Expected(expect.transfer_id, outcome)
        return rank_pb2.KvReport()

    def _send(self, number: int, send: rank_pb2.KvSend) -> None:
        assert self._sender is not None, "the rank is of a decode worker"
        transfer = self._sender.open(
            TransferSpec(
                transfer_id=send.transfer_id,
                attempt=send.attempt,
                address=send.address,
                receiver_incarnation=send.receiver_incarnation,
                block_ids=tuple(send.block_ids),
                span=wire.span_from_proto(send.span),
                first_block=send.first_block,
            )
        )
        self._sends[number] = transfer
        self._spawn(number, self._follow(number, transfer))

    async def _follow(self, number: int, transfer: OutgoingTransfer) -> rank_pb2.KvReport:
        try:
            result = await transfer.ended()
        finally:
            del self._sends[number]
        sent = rank_pb2.KvSent(transport=result.transport, num_bytes=result.num_bytes, num_chunks=result.num_chunks)
        return rank_pb2.KvReport(sent=sent)

    async def _abort(self, number: int) -> rank_pb2.KvReport:
        if (transfer := self._sends.get(number)) is not None:
            await transfer.abort()
        if (expected := self._expected.get(number)) is not None and self._receiver is not None:
            await self._receiver.abort(expected.transfer_id)
            if not expected.outcome.done():
                expected.outcome.set_exception(TransferFailed("the transfer was aborted by its receiver"))
        return rank_pb2.KvReport()

    async def _collect(self, number: int) -> rank_pb2.KvReport:
        if (expected := self._expected.get(number)) is None:
            raise TransferFailed(f"order {number} brings no transfer here")
        try:
            first_token_id = await expected.outcome
        finally:
            self._expected.pop(number, None)  # it may be collected twice
        return rank_pb2.KvReport(first_token=SampledToken(id=first_token_id))

    def _on_committed(self, transfer_id: str, first_token_id: int) -> None:
        self._outcome_of(transfer_id).set_result(first_token_id)

    def _on_failed(self, transfer_id: str, error: MeshError) -> None:
        self._outcome_of(transfer_id).set_exception(error)

    def _outcome_of(self, transfer_id: str) -> "asyncio.Future[int]":
        return next(transfer.outcome for transfer in self._expected.values() if transfer.transfer_id == transfer_id)

    def _spawn(self, number: int, coroutine: Coroutine[Any, Any, rank_pb2.KvReport]) -> None:
        spawn(self._tasks, self._run(number, coroutine))

    async def _run(self, number: int, coroutine: Coroutine[Any, Any, rank_pb2.KvReport]) -> None:
        try:
            report = await coroutine
        except MeshError as error:
            report = _failed(error)
        except Exception as error:
            log.error("an order about KV failed", exc_info=error)
            report = _failed(WorkerLost(f"{type(error).__name__}: {error}; the rank's log has the details"))
        report.number = number
        self._report(report)


def _failed(error: MeshError) -> rank_pb2.KvReport:
    return rank_pb2.KvReport(failed=rank_pb2.KvFailed(error=type(error).__name__, reason=str(error)))
