"""Receiving KV: the decode worker's side.

Life of a transfer here:

    expect()      registers reserved blocks; chunks of this transfer id and attempt may be written into them
    push()        runs a conversation (incoming_conversation.py) over gRPC, in one call. If the sender's KV lies in
                  several processes, there are as many conversations, see incoming_transfer.py
    serve_call()  runs a conversation over a link
    on_committed  all KV has arrived and is verified
    on_failed     the transfer failed: a chunk did not verify, the layout differs, or the sender disconnected, was
                  silent for a lease, or never came
    abort()       this worker no longer needs the KV; no callback follows

Exactly one of the last three ends a transfer. When the callback is called, or when abort returns, no write is in flight
and none follows.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import structlog

from kvtransfer.incoming_conversation import IncomingConversation, ReceiverResources
from kvtransfer.incoming_transfer import ExpectedTransfer, IncomingShards, ShardChecks
from kvtransfer.messages import (
    SERVICE_NAME,
    Committed,
    ReceiverMessage,
    SenderMessage,
    TransferOpen,
    reply_to_bytes,
    request_from_bytes,
)
from kvtransfer.settings import TransferSettings
from kvtransfer.store import KVStore
from kvtransfer.transports import open_receive_transports
from kvtransfer.transports.base import ReceiveTransport
from kvtransfer.transports.link import Call
from mesh.domain.errors import LeaseExpired, MeshError, TransferFailed
from mesh.tasks import mark_retrieved, until_ended

log = structlog.get_logger(__name__)

# A lease has three renewals: for twenty leases a sender has read nothing, and it should have given up after one.
_MAX_UNREAD_RENEWALS = 64


@dataclass(frozen=True, slots=True)
class ReceiverCallbacks:
    """Called on the event loop, as the module's docstring describes. They must not raise."""

    on_committed: Callable[[str, int], None]
    on_failed: Callable[[str, MeshError], None]


@dataclass(slots=True)
class _Incoming:
    """`conversations` are those that run, one for each shard."""

    expected: ExpectedTransfer
    shards: IncomingShards
    opening_lease: asyncio.TimerHandle
    conversations: "set[asyncio.Task[None]]" = field(default_factory=set)
    is_aborted: bool = False
    num_bytes: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class KVReceiver:
    """Receives KV into one store from any number of prefill workers. One per process, on its event loop."""

    def __init__(
        self,
        store: KVStore,
        incarnation: str,
        callbacks: ReceiverCallbacks,
        settings: TransferSettings | None = None,
        transports: tuple[ReceiveTransport, ...] | None = None,
    ) -> None:
        self._store = store
        self._incarnation = incarnation
        self._callbacks = callbacks
        self._settings = settings or TransferSettings()
        self._transports = transports or open_receive_transports(self._settings)
        self._executor = ThreadPoolExecutor(self._settings.num_threads, thread_name_prefix="kv-scatter")
        self._resources = ReceiverResources(
            store=store,
            settings=self._settings,
            executor=self._executor,
            link_writes=threading.BoundedSemaphore(self._settings.num_threads),
        )
        self._incoming: dict[str, _Incoming] = {}
        for transport in self._transports:
            transport.serve_links(self.serve_call)

    def expect(self, expected: ExpectedTransfer) -> None:
        """Let a transfer come. Raises ValueError if its id is in use, or its blocks do not fit its tokens."""
        transfer_id = expected.transfer_id
        if transfer_id in self._incoming:
            raise ValueError(f"transfer {transfer_id} is expected already")
        expected.require_fits(self._store.layout)
        loop = asyncio.get_running_loop()
        opening_lease = loop.call_later(self._settings.opening_lease_s, self._never_opened, transfer_id)
        self._incoming[transfer_id] = _Incoming(expected, IncomingShards(self._store.span), opening_lease)

    async def abort(self, transfer_id: str) -> None:
        """End the transfer; idempotent. Its blocks may be freed afterwards: no write is in flight."""
        incoming = self._incoming.get(transfer_id)
        if incoming is None:
            return
        incoming.is_aborted = True
        self._fail(incoming, TransferFailed("the transfer was aborted by its receiver"))
        await incoming.ended.wait()

    async def close(self) -> None:
        """Abort all transfers, and close threads and transports; idempotent. A caller that is cancelled waits for it,
        too.
        """
        await until_ended(self._close())

    async def _close(self) -> None:
        await asyncio.gather(*(self.abort(transfer_id) for transfer_id in list(self._incoming)))
        self._executor.shutdown(wait=False)
        transports, self._transports = self._transports, ()
        for transport in transports:
            transport.close()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve `Push` on `server`. Generated code, which this replaces, would copy every payload."""
        push = grpc.stream_stream_rpc_method_handler(
            lambda requests, _: self.push(requests), request_from_bytes, reply_to_bytes
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {"Push": push}),))

    async def push(self, requests: AsyncIterator[SenderMessage]) -> AsyncGenerator[ReceiverMessage, None]:
        """Run one conversation, yielding the replies. Raises a MeshError if the transfer is refused or fails.

        A separate task runs the conversation, because it reads requests and waits for writes concurrently, and must
        finish its cleanup even if the caller stops iterating.
        """
        replies: asyncio.Queue[ReceiverMessage | None] = asyncio.Queue()
        max_unread = self._settings.credit_chunks + _MAX_UNREAD_RENEWALS

        def put(message: ReceiverMessage) -> None:
            if replies.qsize() >= max_unread:
                raise TransferFailed("the sender reads no replies")
            replies.put_nowait(message)

        async def read() -> SenderMessage | None:
            return await anext(requests, None)

        task = asyncio.create_task(self._run(IncomingConversation(self._resources, read, put)))
        task.add_done_callback(lambda _: replies.put_nowait(None))
        try:
            while (reply := await replies.get()) is not None:
                yield reply
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])
            mark_retrieved(task)

    async def serve_call(self, call: Call) -> None:
        """Run one conversation over a link."""
        task = asyncio.current_task()
        assert task is not None
        call.on_end = task.cancel

        async def read() -> SenderMessage:
            return request_from_bytes(await call.read())

        def reply(message: ReceiverMessage) -> None:
            call.send(reply_to_bytes(message))

        try:
            await self._run(IncomingConversation(self._resources, read, reply, call))
        except MeshError as error:
            call.leave(error)

    async def _run(self, conversation: IncomingConversation) -> None:
        opening = await conversation.read()
        if not isinstance(opening, TransferOpen):
            raise TransferFailed("the first message of a transfer must be open")
        incoming = self._admit(opening)
        task = asyncio.current_task()
        assert task is not None
        incoming.conversations.add(task)
        try:
            checks = ShardChecks(incoming.expected, self._store.layout, opening.span)
            checks.check_open(opening)
            incoming.shards.open(opening.span)
            if incoming.shards.is_opened:
                incoming.opening_lease.cancel()
            commit = await conversation.receive(opening.transports, self._transports, checks)
            incoming.shards.commit(opening.span, commit.first_token_id)
        except (Exception, asyncio.CancelledError) as error:
            incoming.conversations.discard(task)
            incoming.shards.leave(opening.span)
            reason = self._error_for_sender(incoming, error)
            self._fail(incoming, reason)
            raise reason from error
        incoming.conversations.discard(task)
        incoming.num_bytes += checks.num_bytes
        if incoming.shards.is_committed:
            self._end(incoming)
            log.debug("transfer_finished", transfer_id=opening.transfer_id, num_bytes=incoming.num_bytes)
            self._callbacks.on_committed(opening.transfer_id, commit.first_token_id)
        conversation.reply(Committed())

    def _admit(self, opening: TransferOpen) -> _Incoming:
        """Return the transfer that is expected by this id, or raise TransferFailed without side effects."""
        if opening.receiver_incarnation != self._incarnation:
            raise TransferFailed("the transfer is for another incarnation of this worker")
        incoming = self._incoming.get(opening.transfer_id)
        if incoming is None or incoming.expected.attempt != opening.attempt:
            raise TransferFailed(f"transfer {opening.transfer_id}, attempt {opening.attempt}, is not expected here")
        incoming.shards.require_free(opening.span)
        log.debug("transfer_started", transfer_id=opening.transfer_id, sender=opening.sender_id)
        return incoming

    def _never_opened(self, transfer_id: str) -> None:
        limit = self._settings.opening_lease_s
        self._fail(self._incoming[transfer_id], LeaseExpired(f"no sender has opened the transfer for {limit:g} s"))

    def _error_for_sender(self, incoming: _Incoming, error: BaseException) -> MeshError:
        """The error that the sender of a shard is told when its conversation ends with `error`."""
        if incoming.is_aborted:
            return TransferFailed("the transfer was aborted by its receiver")
        if isinstance(error, MeshError):
            return error
        if not isinstance(error, asyncio.CancelledError):
            log.error("transfer_failed", transfer_id=incoming.expected.transfer_id, exc_info=error)
            return TransferFailed("the receiver failed; its log has the details")
        if incoming.shards.error is not None:
            return TransferFailed(f"another part of the transfer has failed: {incoming.shards.error}")
        return TransferFailed("the sender disconnected before the commit")

    def _fail(self, incoming: _Incoming, reason: MeshError) -> None:
        """Let the transfer fail, unless it has, and end its conversations. Once none writes any more, `on_failed` gets
        the first reason, unless the transfer was aborted.
        """
        transfer_id, shards = incoming.expected.transfer_id, incoming.shards
        if shards.error is None:
            shards.fail(reason)
            for conversation in incoming.conversations:
                conversation.cancel()
        if shards.error is not None and shards.has_failed and not incoming.ended.is_set():
            self._end(incoming)
            if not incoming.is_aborted:
                log.info("transfer_failed", transfer_id=transfer_id, error=str(shards.error))
                self._callbacks.on_failed(transfer_id, shards.error)

    def _end(self, incoming: _Incoming) -> None:
        incoming.opening_lease.cancel()
        del self._incoming[incoming.expected.transfer_id]
        incoming.ended.set()
