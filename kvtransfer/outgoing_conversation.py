"""The sender's half of one conversation.

    open ──▶ granted     the receiver chooses one of the paths and grants credit; then three tasks run concurrently:
    gather               waits for announced KV, a credit (its own, and one of those of the receiver) and a slot, and
                         queues the chunk for a thread, which copies KV into the slot and sends the chunk; at last the
                         commit
    renew                renews the lease three times per lease, even while the engine computes
    listen               an ack frees a slot and returns a credit; Committed, the end, frees the other slots

At the end, on success or failure, the call is cancelled, no thread reads the store, and slots and paths are free.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvtransfer.chunks import Digest, Extent, ExtentQueue, chunk_seed, transfer_seed
from kvtransfer.messages import (
    Ack,
    Commit,
    Committed,
    Granted,
    ReceiverMessage,
    Renew,
    Renewed,
    TransferChunk,
    TransferOpen,
    request_to_bytes,
)
from kvtransfer.push_call import ConnectionPool, LinkCall, PushCall
from kvtransfer.settings import TransferSettings
from kvtransfer.store import KVStore
from kvtransfer.transports.base import SendPath, SendTransport, Slot
from mesh.domain.errors import LayoutMismatch, TransferFailed
from mesh.domain.kv import KVSpan
from mesh.rpc.credentials import Metadata
from mesh.tasks import run_to_end, task_group


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """A transfer of the KV of `span` of one prompt. `block_ids` are the sender's blocks, by index in the transfer
    (KVLayout.transfer_entries).

    The receiver has the blocks before `first_block` already; they are never sent.
    """

    transfer_id: str
    attempt: int
    address: str
    receiver_incarnation: str
    block_ids: tuple[int, ...]
    span: KVSpan
    first_block: int = 0


@dataclass(frozen=True, slots=True)
class TransferResult:
    transport: str
    num_bytes: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class SenderResources:
    """The resources that all transfers of a KVSender share."""

    store: KVStore
    worker_id: str
    metadata: Metadata
    settings: TransferSettings
    transports: tuple[SendTransport, ...]
    connections: ConnectionPool
    executor: Executor


AnyCall = PushCall | LinkCall


class _PromptEnd(NamedTuple):
    num_tokens: int
    first_token_id: int


class OutgoingConversation:
    """The conversation of one transfer: over a link if there is one to the receiver, else over gRPC."""

    def __init__(self, spec: TransferSpec, resources: SenderResources) -> None:
        self._spec = spec
        self._resources = resources
        layer_block_bytes = spec.span.heads.count * resources.store.layout.cell_bytes
        self._announced = ExtentQueue(layer_block_bytes, resources.settings.chunk_bytes)
        self._prompt_end: _PromptEnd | None = None
        self._layout = resources.store.layout
        self._seed = transfer_seed(spec.transfer_id, spec.attempt)
        self._digest = Digest()
        self._num_chunks = 0
        self._num_bytes = 0
        self._paths: dict[str, SendPath] = {}  # by name of the transport, in order of preference
        self._slots: dict[int, Slot] = {}  # by sequence number, until acknowledged
        self._queueing = threading.Lock()
        self._queued: deque[Callable[[], bytes]] = deque()  # each makes a message, on a thread
        self._is_sending = False  # a thread takes what is queued
        self._is_granted = False
        self._is_committing = False
        self._watchdog = Watchdog(resources.settings)

    def announce(self, extent: Extent) -> None:
        """Queue KV that is in the store and final."""
        self._announced.add(extent)

    def finish(self, num_tokens: int, first_token_id: int) -> None:
        """Commit once all announced KV has been sent. Only the first call has an effect."""
        self._prompt_end = self._prompt_end or _PromptEnd(num_tokens, first_token_id)
        self._announced.finish()

    async def run(self) -> TransferResult:
        """Run from open to committed. Raises MeshError; any other error is a bug or a broken store."""
        resources, receiver = self._resources, (self._spec.address, self._spec.receiver_incarnation)
        link = resources.transports[0].link(*receiver)
        with resources.connections.use(self._spec.address) as connection:
            async with self._watchdog.watch():
                if link is not None:
                    linked = LinkCall(link.call())
                    try:
                        return await self._run_over(linked, connection.credit)
                    except TransferFailed:
                        if self._is_granted or not linked.is_lost:
                            raise
                    # The receiver has closed the idle link, and has not got the opening.
                call = PushCall(connection.channel, resources.metadata)
                return await self._run_over(call, connection.credit)

    async def _run_over(self, call: AnyCall, receiver_credit: asyncio.Semaphore) -> TransferResult:
        """Run the conversation over this call. Ends the call, and releases slots and paths, in every case."""
        try:
            return await self._converse(call, receiver_credit)
        finally:
            call.cancel()
            for slot in self._slots.values():
                slot.release(is_acknowledged=False)
            while self._paths:
                self._paths.popitem()[1].leave()

    async def _converse(self, call: AnyCall, receiver_credit: asyncio.Semaphore) -> TransferResult:
        await self._find_paths(self._resources.transports[: 1 if isinstance(call, LinkCall) else None])
        await call.write(request_to_bytes(self._opening()))
        granted = await self._granted(call)
        path = self._paths[granted.transport]
        await path.join(granted.rendezvous)
        async with _Credit(granted.credit_chunks, receiver_credit) as credit, task_group() as tasks:
            tasks.create_task(self._gather(call, path, credit, tasks))
            helpers = [tasks.create_task(self._renew(call, min(granted.lease_s, self._resources.settings.lease_s) / 3))]
            if isinstance(call, PushCall):
                helpers.append(tasks.create_task(call.write_all()))
            try:
                await self._listen(call, credit)
            finally:
                self._queued.clear()  # nobody will get it
            for helper in helpers:
                helper.cancel()
        return TransferResult(granted.transport, self._num_bytes, self._num_chunks)

    async def _find_paths(self, transports: Sequence[SendTransport]) -> None:
        for transport in transports:
            path = await transport.path(self._spec.address, self._spec.receiver_incarnation)
            if path is not None:
                self._paths[transport.name] = path
        if not self._paths:
            names = ", ".join(transport.name for transport in transports)
            raise TransferFailed(f"{names} cannot reach {self._spec.address} now; the log says why")

    def _opening(self) -> TransferOpen:
        return TransferOpen(
            transfer_id=self._spec.transfer_id,
            attempt=self._spec.attempt,
            receiver_incarnation=self._spec.receiver_incarnation,
            sender_id=self._resources.worker_id,
            layout=self._layout,
            transports=tuple(path.offer() for path in self._paths.values()),
            first_block=self._spec.first_block,
            end_block=len(self._spec.block_ids),
            span=self._spec.span,
        )

    async def _granted(self, call: AnyCall) -> Granted:
        try:
            granted = await self._read(call)
        except LayoutMismatch:  # it may be that no path works for the receiver
            self._decline_before("")
            raise
        is_grant = isinstance(granted, Granted) and granted.credit_chunks > 0 and granted.lease_s > 0
        if not isinstance(granted, Granted) or not is_grant or granted.transport not in self._paths:
            raise TransferFailed("the receiver granted no credit, no lease, or a transport that was not offered")
        self._decline_before(granted.transport)
        self._is_granted = True
        return granted

    def _decline_before(self, chosen: str) -> None:
        for name, path in self._paths.items():
            if name == chosen:
                return
            path.decline()

    async def _gather(self, call: AnyCall, path: SendPath, credit: "_Credit", tasks: asyncio.TaskGroup) -> None:
        number = 0
        while await self._announced.wait():
            await credit.acquire()
            extent = self._announced.take()  # after the wait for credit, which lets small extents join
            slot = self._slots[number] = await path.acquire(extent.num_bytes(self._layout))
            self._queue(call, partial(self._fill, slot, number, extent), tasks)
            number += 1
        self._queue(call, self._commit, tasks)

    def _queue(self, call: AnyCall, make: Callable[[], bytes], tasks: asyncio.TaskGroup) -> None:
        """Let a thread make and send a message, behind those before it."""
        with self._queueing:
            self._queued.append(make)
            is_sending, self._is_sending = self._is_sending, True
        if not is_sending:
            tasks.create_task(run_to_end(self._resources.executor, partial(self._send_queued, call)))

    def _send_queued(self, call: AnyCall) -> None:
        """Runs on a thread, which does not wait for the event loop between two messages."""
        while True:
            with self._queueing:
                if not self._queued:
                    self._is_sending = False
                    return
                make = self._queued.popleft()
            request = make()
            self._watchdog.on_request()
            call.send(request)

    def _fill(self, slot: Slot, number: int, extent: Extent) -> bytes:
        """Copy KV from the store into the slot; returns the chunk."""
        block_ids = self._spec.block_ids[extent.blocks.first : extent.blocks.end]
        buffer = slot.buffer()
        seed = chunk_seed(self._seed, number, extent, len(buffer))
        checksum = self._resources.store.copy_out(block_ids, extent.span, buffer, seed)
        self._digest.add(checksum)
        self._num_chunks += 1
        self._num_bytes += len(buffer)
        return request_to_bytes(TransferChunk(number, extent, len(buffer), checksum, slot.seal()))

    def _commit(self) -> bytes:
        end = self._prompt_end
        assert end is not None
        self._is_committing = True
        return request_to_bytes(Commit(end.num_tokens, self._num_chunks, self._digest.value, end.first_token_id))

    async def _renew(self, call: AnyCall, interval_s: float) -> None:
        while not self._is_committing:
            await asyncio.sleep(interval_s)
            if not self._is_committing:
                call.send(request_to_bytes(Renew()))

    async def _listen(self, call: AnyCall, credit: "_Credit") -> None:
        while not isinstance(reply := await self._read(call), Committed):
            if isinstance(reply, Renewed):
                continue
            number = reply.sequence_number if isinstance(reply, Ack) else self._num_chunks
            if number >= self._num_chunks or number not in self._slots:
                raise TransferFailed("the receiver acknowledged a chunk that was not sent")
            self._watchdog.on_answer()
            self._slots.pop(number).release(is_acknowledged=True)
            credit.release()
        if not self._is_committing:
            raise TransferFailed("the receiver committed before the sender did")
        while self._slots:
            self._slots.popitem()[1].release(is_acknowledged=True)
        await call.ended()

    async def _read(self, call: AnyCall) -> ReceiverMessage:
        reply = await call.read()
        self._watchdog.on_message()
        return reply


class _Credit:
    """Limits the unacknowledged chunks of this transfer, and those of all transfers to its receiver together. At the
    end, this transfer's unacknowledged chunks no longer count for the others.
    """

    def __init__(self, num_chunks: int, of_receiver: asyncio.Semaphore) -> None:
        self._own = asyncio.Semaphore(num_chunks)
        self._of_receiver = of_receiver
        self._num_acquired = 0

    async def __aenter__(self) -> "_Credit":
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._num_acquired:
            self.release()

    async def acquire(self) -> None:
        """Wait until one more chunk may be sent."""
        await self._own.acquire()
        await self._of_receiver.acquire()
        self._num_acquired += 1

    def release(self) -> None:
        """A chunk has been acknowledged."""
        self._num_acquired -= 1
        self._of_receiver.release()
        self._own.release()


class Watchdog:
    """Ends a sender's conversation with TransferFailed if the receiver is silent or stuck.

    Silent: no message has arrived for `lease_s`. A live receiver is never silent, because it confirms renewals.
    Stuck: the receiver is alive but has not answered a chunk or the commit for `progress_timeout_s`.
    Both are noticed up to a tenth later.
    """

    def __init__(self, settings: TransferSettings) -> None:
        self._lease_s = settings.lease_s
        self._progress_timeout_s = settings.progress_timeout_s
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._progress_at = self._loop.time()
        self._num_requests = self._num_answers = 0
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Watch while the block, the whole conversation, runs. Raises TransferFailed."""
        try:
            async with self._timeout:
                self._look()
                yield
        except TimeoutError:
            silent_s = self._loop.time() - self._heard_at
            if silent_s >= self._lease_s:
                raise TransferFailed(f"the receiver has sent nothing for {self._lease_s:g} s") from None
            raise TransferFailed(f"the receiver has not answered for {self._progress_timeout_s:g} s") from None
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def on_message(self) -> None:
        """Note that a message has come from the receiver."""
        self._heard_at = self._loop.time()

    def on_request(self) -> None:
        """Note that the receiver must answer one more request (a chunk or the commit). On the thread that sends it."""
        if self._num_requests == self._num_answers:
            self._progress_at = self._loop.time()
        self._num_requests += 1

    def on_answer(self) -> None:
        """Note that the receiver has answered a request. The timeout for the remaining ones starts anew."""
        self._progress_at = self._loop.time()
        self._num_answers += 1

    @property
    def due(self) -> float:
        """When the receiver is silent or stuck, unless it is heard of before, by the loop's clock."""
        due = self._heard_at + self._lease_s
        if self._num_requests > self._num_answers:
            due = min(due, self._progress_at + self._progress_timeout_s)
        return due

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self.due:
            self._timeout.reschedule(now)
        else:
            soon = now + min(self._lease_s, self._progress_timeout_s) / 10
            self._timer = self._loop.call_at(min(self.due, soon), self._look)
